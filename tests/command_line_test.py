"""The frame of a command: one `error:` line, and an exit code that says how it ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from absl import logging as absl_logging

from towers import command_line
from towers.command_line import Terminated, exit_code, is_verbose

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def defined():
    """Flags of these names, for a test."""
    names = ("num_gpus", "num_towers", "batch_norm", "jit_compile")
    added = [name for name in names if name not in flags.FLAGS]
    for name in added:
        flags.DEFINE_string(name, None, "for these tests")
    yield
    for name in added:
        delattr(flags.FLAGS, name)


@pytest.mark.parametrize(("text", "expected"), [
    ("num_gpus (8) is more than this machine has. Use num_gpus=2, or num_gpus=2 num_towers=8.",
     "--num_gpus (8) is more than this machine has. Use --num_gpus=2, or --num_gpus=2 "
     "--num_towers=8."),
    ("batch_norm ('x') must be one of average", "--batch_norm ('x') must be one of average"),
    ("--num_gpus (0) must be at least 1.", "--num_gpus (0) must be at least 1."),
    ("my.num_gpus=2 and max_num_gpus (3)", "my.num_gpus=2 and max_num_gpus (3)"),
    ("num_gpus alone is a word", "num_gpus alone is a word"),
    ("undefined_flag=2", "undefined_flag=2"),
])
def test_a_librarys_argument_becomes_a_flag_where_it_is_given_a_value(text, expected, defined):
    assert command_line.as_flags(text) == expected


def raises(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize("error, code, stderr", [
    (ValueError("--x (3) must\n   be 2."), 2, "error: --x (3) must be 2.\n"),
    (KeyboardInterrupt(), 130, "stopped by Ctrl-C\n"),
    (Terminated(), 143, "stopped by SIGTERM\n"),
])
def test_what_the_user_has_done_is_one_line(error, code, stderr, capsys):
    assert exit_code(raises(error)) == code
    assert capsys.readouterr() == ("", stderr)


def test_anything_else_is_a_traceback_and_1(capsys):
    assert exit_code(raises(KeyError("x"))) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("Traceback") and captured.err.endswith("KeyError: 'x'\n")


def test_a_command_that_returns_is_0(capsys):
    assert exit_code(lambda: None) == 0
    assert capsys.readouterr() == ("", "")


def test_sigterm_comes_as_an_error_that_except_exception_lets_pass():
    def command():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception:
            pytest.fail("caught")

    assert exit_code(command) == command_line.TERMINATED


@pytest.mark.parametrize("verbosity, expected", [
    (absl_logging.WARNING, False), (absl_logging.INFO, True), (absl_logging.ERROR, False)
])
def test_a_mistakes_traceback_is_shown_to_who_asks_for_it(verbosity, expected, capsys):
    before = absl_logging.get_verbosity()
    absl_logging.set_verbosity(verbosity)
    try:
        assert is_verbose() is expected
        assert exit_code(raises(ValueError("wrong"))) == 2
    finally:
        absl_logging.set_verbosity(before)
    stderr = capsys.readouterr().err
    assert ("Traceback" in stderr) is expected
    assert stderr.endswith("error: wrong\n")


PROGRAM = """
import sys
from absl import flags
from towers.command_line import exit_code, parse_flags
flags.DEFINE_integer("count", 3, "How many.")
def command():
    if parse_flags(sys.argv):
        print(flags.FLAGS.count)
sys.exit(exit_code(command))
"""


@pytest.mark.parametrize("arguments, code, stdout, stderr", [
    ([], 0, "3\n", ""),
    (["--count=5"], 0, "5\n", ""),
    (["--count=x"], 2, "", "error: flag --count=x: invalid literal for int()"),
    (["--cuont=5"], 2, "", "error: Unknown command line flag 'cuont'. Did you mean: count ?\n"),
    (["5"], 2, "", "error: '5' is not a flag. Flags begin with --; see --help.\n"),
    (["--help"], 0, "How many.", ""),
])
def test_flags_are_filled_or_refused_in_one_line(arguments, code, stdout, stderr):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == code, done.stderr
    assert stdout in done.stdout and stderr in done.stderr
    assert bool(done.stdout) is bool(stdout)
    assert done.stderr.count("\n") == bool(stderr)
