"""`import towers` costs nothing; what would make TensorFlow useless is said before its import."""

import os
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest

import tests.real_workers
from towers.machine import environment

ROOT = Path(__file__).parents[2]


def run_python(code, **variables):
    """Runs code in a fresh Python, without the variables that set Keras' backend."""
    clean = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "KERAS_HOME")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**clean, **variables}, capture_output=True,
        text=True, timeout=60, check=False,
    )


@pytest.mark.parametrize("tf_config", ["", tests.real_workers.tf_config(["a:1", "b:2"], 1)])
def test_importing_towers_and_its_configuration_does_not_import_tensorflow(tf_config):
    done = run_python(
        "import sys, towers; towers.TrainConfig(); dir(towers); assert 'tensorflow' not in "
        "sys.modules and 'keras' not in sys.modules; print(towers.__version__)",
        TF_CONFIG=tf_config,
    )
    assert (done.stdout, done.stderr) == ("0.1.0\n", "")


def test_another_backend_in_the_environment_is_refused_before_tensorflow_is_imported():
    done = run_python(
        "import sys, towers\ntry:\n    towers.train\nexcept ValueError as error:\n"
        "    print(error, 'tensorflow' in sys.modules)",
        KERAS_BACKEND="jax",
    )
    assert done.stdout.startswith("Keras' backend is 'jax' (KERAS_BACKEND); ")
    assert done.stdout.endswith("export KERAS_BACKEND=tensorflow False\n")


@pytest.mark.parametrize("text, variables, said", [
    ('{"backend": "torch"}', {}, "Keras' backend is 'torch' (FOLDER/keras.json)"),
    ('{"backend": "torch"}', {"KERAS_BACKEND": "tensorflow"}, "fine"),
    ("", {}, "fine"), ("{", {}, "fine"), ('{"epsilon": 1e-7}', {}, "fine"),
])
def test_keras_json_names_the_backend_unless_the_environment_does(text, variables, said, tmp_path):
    (tmp_path / "keras.json").write_text(text)
    code = "import sys; from types import SimpleNamespace as fake; from towers.machine import " \
        "environment; sys.modules['tensorflow'] = fake(__version__='3.0'); environment.check(); " \
        "print('fine')"
    done = run_python(code, KERAS_HOME=str(tmp_path), **variables)
    assert said.replace("FOLDER", str(tmp_path)) in done.stdout + done.stderr


def test_a_missing_tensorflow_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ValueError, match="cannot be imported .* pip install 'tensorflow>=2.20'"):
        environment.check()


@pytest.mark.parametrize(("version", "is_accepted"), [
    ("1.15.5", False), ("2.19.1", False), ("2.20.0", True), ("2.21.0-rc1", True), ("3.0", True),
])
def test_tensorflow_2_20_is_the_oldest_that_is_accepted(monkeypatch, version, is_accepted):
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace(__version__=version))
    error = pytest.raises(ValueError, match=f"TensorFlow {version} is too old")
    with nullcontext() if is_accepted else error:
        environment.check()
