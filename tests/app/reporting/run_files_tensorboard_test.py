"""The log is read back by TensorBoard's own reader."""

import resource
import sys
from contextlib import contextmanager

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import towers
from tests.app.run_test import config
from towers.app.reporting import run_files
from towers.app.reporting.run_files import TensorBoardLog


def read(directory):
    log = EventAccumulator(str(directory), size_guidance={"tensors": 0})  # 0: all
    log.Reload()
    return log


def values(directory, tag):
    import tensorflow as tf

    return [
        (event.step, float(tf.make_ndarray(event.tensor_proto)))
        for event in read(directory).Tensors(tag)
    ]


def test_a_runs_epochs_are_in_the_log_with_their_values_and_histograms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history = towers.train(config(run_dir="run", epochs=2, tensorboard=True, histograms=True))
    log = tmp_path / "run" / "tensorboard"
    for part, prefix in ("train", ""), ("validation", "val_"):
        for name in "loss", "accuracy":
            expected = history[prefix + name]
            steps, found = zip(*values(log / part, f"epoch_{name}"), strict=True)
            assert steps == (0, 1)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert any("kernel" in tag for tag in read(log / "train").Tags()["tensors"])


def test_a_full_disk_is_one_warning_in_a_fit_too(tmp_path):
    warnings = []
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    parallel = towers.make_parallel(model, 2)
    parallel.compile("sgd", "mse")
    log = TensorBoardLog(tmp_path, warnings.append)
    with largest_file(0):
        parallel.fit(np.ones((4, 3)), np.ones((4, 1)), epochs=3, callbacks=[log], verbose=0)
    (warning,) = warnings
    assert f"{tmp_path} cannot be written any more" in warning and "training continues" in warning


def test_a_missing_package_is_an_error_that_says_how_to_install_it(monkeypatch):
    run_files.check_installed()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "tensorboard.version")
    with pytest.raises(ValueError, match="`tensorboard` needs .*pip install 'tf-towers"):
        run_files.check_installed()


@contextmanager
def largest_file(size):
    """The system refuses to write files beyond `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
