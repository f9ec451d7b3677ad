"""What `import towers` costs; what libraries write to stderr; which line of a user is at work."""

import inspect
import os
import re
import subprocess
import sys
import threading
import types
from contextlib import nullcontext
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import processes
from towers.machine import environment
from towers.step.placement import Placement
from towers.machine.user_lines import (
    current_line,
    line_of,
    line_of_error,
    TowersWarning,
    warn_user,
)

ROOT, HERE = Path(__file__).parents[2], Path(__file__).name


def run_python(code, cwd=ROOT, **variables):
    """Runs code in a fresh Python, without the variables that set Keras' backend."""
    clean = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "KERAS_HOME")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("tf_config", ["", processes.tf_config(["a:1", "b:2"], 1)])
def test_importing_towers_and_its_configuration_does_not_import_tensorflow(tf_config):
    done = run_python(
        "import sys, towers; towers.TrainConfig(); dir(towers); assert 'tensorflow' not in "
        "sys.modules and 'keras' not in sys.modules; print(towers.__version__)",
        TF_CONFIG=tf_config,
    )
    assert (done.stdout, done.stderr) == ("0.1.0\n", "")


def test_dir_lists_the_public_names_and_a_mistyped_one_is_an_error_with_the_nearest():
    public = {name for name in dir(towers) if not name.startswith("__")}
    assert public == set(towers.__all__) and hasattr(towers, "machine")  # an imported folder
    with pytest.raises(AttributeError, match=r"'make_paralel'. Did you mean 'make_parallel'\?$"):
        towers.make_paralel
    with pytest.raises(AttributeError, match=r"has no attribute 'xyz'.$"):
        towers.xyz


def test_another_backend_in_the_environment_is_refused_before_tensorflow_is_imported():
    done = run_python(
        "import sys, towers\ntry:\n    towers.train\nexcept ValueError as error:\n"
        "    print(error, 'tensorflow' in sys.modules)",
        KERAS_BACKEND="jax",
    )
    assert done.stdout.startswith("Keras' backend is 'jax' (KERAS_BACKEND); ")
    assert done.stdout.endswith("export KERAS_BACKEND=tensorflow False\n")


@pytest.mark.matrix
def test_the_troubleshooting_page_has_every_line_that_tensorflow_prints():
    """Without a GPU: the first three stay with TF_CPP_MIN_LOG_LEVEL=3, all others are hidden."""
    code = (
        "import keras, numpy as np, towers; towers.logical_cpus(2); m = keras.Sequential([keras."
        "Input((2,)), keras.layers.Dense(1)]); m = towers.make_parallel(m, 2); "
        "m.compile('sgd', 'mse'); m.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)"
    )
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    section = page.partition("## Messages of TensorFlow")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    known = [name.partition(" ... ")[0] for name in re.findall("`([^`]+)`", "".join(cells))]
    for level, allowed in [("0", known), ("3", known[:3])]:
        done = run_python(code, TF_CPP_MIN_LOG_LEVEL=level, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0 and ("cuInit" in done.stderr) == (level == "0")
        lines = [
            each
            for each in done.stderr.splitlines()
            if not each.startswith("To enable the following")
        ]
        assert [each for each in lines if not any(part in each for part in allowed)] == []


@pytest.mark.parametrize(
    "text, variables, said",
    [
        ('{"backend": "torch"}', {}, "Keras' backend is 'torch' (FOLDER/keras.json)"),
        ('{"backend": "torch"}', {"KERAS_BACKEND": "tensorflow"}, "fine"),
        ("", {}, "fine"),
        ("{", {}, "fine"),
    ],
)
def test_keras_json_names_the_backend_unless_the_environment_does(text, variables, said, tmp_path):
    (tmp_path / "keras.json").write_text(text)
    code = (
        "import sys; from types import SimpleNamespace as fake; from towers.machine import "
        "environment; sys.modules['tensorflow'] = fake(__version__='3.0'); environment.check(); "
        "print('fine')"
    )
    done = run_python(code, KERAS_HOME=str(tmp_path), **variables)
    assert said.replace("FOLDER", str(tmp_path)) in done.stdout + done.stderr


def test_a_missing_tensorflow_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ValueError, match="cannot be imported .* pip install 'tensorflow>=2.20'"):
        environment.check()


@pytest.mark.parametrize(
    "version, is_accepted",
    [
        ("2.19.1", False),
        ("2.20.0", True),
        ("2.21.0-rc1", True),
    ],
)
def test_tensorflow_2_20_is_the_oldest_that_is_accepted(monkeypatch, version, is_accepted):
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace(__version__=version))
    error = pytest.raises(ValueError, match=f"TensorFlow {version} is too old")
    with nullcontext() if is_accepted else error:
        environment.check()


NOISY = """
import logging, os, pathlib, sys, warnings
from towers.machine import terminal
with terminal.quiet_stderr() as captured:
    os.write(2, b"C++ before\\n")
    logging.getLogger("tensorflow").warning("logged")
    LINE
    os.write(2, b"C++ after\\n")
    warnings.warn("old")
    print("for the user", file=sys.stderr)
os.write(2, b"at the end\\n")
"""


def run_noisy(line, cwd):
    return run_python(NOISY.replace("LINE", line), cwd)


def test_messages_go_to_the_log_in_order_and_pythons_stderr_to_the_terminal(tmp_path):
    (tmp_path / "log.txt").write_text("first\n")
    done = run_noisy("captured.move_to(pathlib.Path('log.txt'))", tmp_path)
    assert (done.stderr, done.returncode) == ("for the user\nat the end\n", 0)
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert log[:4] == ["first", "C++ before", "WARNING:tensorflow: logged", "C++ after"]
    assert "UserWarning: old" in log[4]


def test_messages_without_a_log_are_dropped(tmp_path):
    done = run_noisy("pass", tmp_path)
    assert (done.stderr, done.returncode) == ("for the user\nat the end\n", 0)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_reaches_the_terminal(tmp_path):
    done = run_noisy("raise RuntimeError('own')", tmp_path)
    assert done.stderr.splitlines()[-1] == "RuntimeError: own"
    assert "C++ before" not in done.stderr


def test_a_crash_says_where_it_was(tmp_path):
    done = run_noisy("os.abort()", tmp_path)
    assert done.stderr.startswith("Fatal Python error: Aborted")
    assert done.returncode < 0


def line_number():
    return inspect.currentframe().f_back.f_lineno


def test_lines_of_keras_and_tensorflow_are_passed_over():
    found = []

    class Asks(keras.layers.Layer):
        def call(self, x):
            found.append(tf.nest.map_structure(lambda _: current_line(), 1))
            return x

    Asks()(tf.ones([1, 2]))
    assert found == [f"{HERE}:{inspect.getsourcelines(Asks)[1] + 2}"]


def test_an_operation_knows_the_line_that_made_it():
    with tf.Graph().as_default():
        made = keras.ops.square(tf.compat.v1.placeholder(tf.float32, [2]))
        next_line = line_number()
    assert line_of(made.op) == f"{HERE}:{next_line - 1}"


def reshape():
    return np.reshape(np.zeros(3), (2, 2))


def test_an_error_knows_the_innermost_line_that_it_or_its_cause_came_through():
    """NumPy's own lines lie further in."""
    with pytest.raises(ValueError) as caught:
        reshape()
    line = f"{HERE}:{inspect.getsourcelines(reshape)[1] + 1}"
    assert line_of_error(caught.value) == line
    error = ValueError("of a library's")
    assert line_of_error(error) is None
    error.__cause__ = caught.value
    assert line_of_error(error) == line
    with pytest.raises(ValueError) as caught:
        Placement("everywhere")  # a dataclass, whose __init__ is in no file
    line = f"{HERE}:{line_number() - 1}"
    assert line_of_error(caught.value) == line


def test_warnings_name_the_users_line():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.warns(TowersWarning) as warned:
        parallel = towers.make_parallel(model, 1)
        parallel.__reduce__()
        keras.tree.map_structure(warn_user, ["in Keras"])
    ours = [each for each in warned if issubclass(each.category, TowersWarning)]
    assert {Path(each.filename) for each in ours} == {Path(__file__)}
    assert len({each.lineno for each in ours}) == 3
    thread = threading.Thread(target=warn_user, args=["in a thread"])
    with pytest.warns(TowersWarning, match="in a thread"):
        thread.start()
        thread.join()


def test_every_warning_of_the_library_names_the_users_line():
    library = Path(towers.__file__).parent
    others = [path for path in library.rglob("*.py") if "warnings.warn(" in path.read_text("utf-8")]
    assert others == [library / "machine/user_lines.py"]
