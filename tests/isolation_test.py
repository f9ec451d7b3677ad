"""Modules have processes of their own: one that dies fails one test, others are other processes."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
def pytest_configure(config):
    if hasattr(config, "workerinput"):
        from tests.isolation import Isolation
        config.pluginmanager.register(Isolation(config))
"""
DIES = """
import os, pathlib, tensorflow as tf

def test_first():
    assert int(tf.constant(1) + 1) == 2
    pathlib.Path("first").write_text(str(os.getpid()))

def test_second():
    assert pathlib.Path("first").read_text() == str(os.getpid())
    os.kill(os.getpid(), 9)

def test_third():
    assert pathlib.Path("first").read_text() != str(os.getpid())
"""
FAILS = """
import os, pathlib, warnings, pytest

@pytest.fixture(scope="module")
def ended():
    yield
    pathlib.Path("ended").touch()

@pytest.mark.filterwarnings("error")  # of this test alone
def test_a(ended):
    assert pathlib.Path("first").read_text() != str(os.getpid())

def test_b(ended):
    warnings.warn("heard")
    assert 1 == 2

@pytest.mark.skip(reason="known")
def test_c(ended):
    pass
"""


def run(directory, **modules):
    """What pytest with one worker says of these modules."""
    (directory / "conftest.py").write_text(CONFTEST)
    for name, text in modules.items():
        (directory / f"{name}_test.py").write_text(text)
    (directory / "pytest.ini").touch()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n1",
            "--dist=loadfile",
            "-rfs",
            *sorted(directory.glob("*_test.py")),
        ],
        cwd=directory,
        env={"PATH": "", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout


@pytest.mark.matrix
def test_a_process_that_dies_fails_the_test_it_was_at(tmp_path):
    said = run(tmp_path, a_dies=DIES, b_fails=FAILS)
    assert "2 failed, 3 passed, 1 skipped, 1 warning" in said, said
    assert "FAILED a_dies_test.py::test_second" in said
    assert "The module's process has died: exit code -9.\n" in said
    assert "b_fails_test.py::test_b - assert 1 == 2" in said and "UserWarning: heard" in said
    assert (tmp_path / "ended").exists()
