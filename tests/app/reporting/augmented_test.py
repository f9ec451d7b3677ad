"""augmented.png shows what training gets, and never ends a run."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import tensorflow as tf

import towers
from towers import TrainConfig
from towers.app.datasets import mnist
from towers.app.datasets.batches import load_examples
from towers.app.reporting import augmented, charts
from towers.resume.epoch import Epoch
from tests.app.run_test import config

pytestmark = pytest.mark.usefixtures("in_an_empty_directory", "without_charts")


def changing_seven(x, seed):
    return x + tf.random.stateless_uniform([], seed)


def digits():
    """The first 40 digits of MNIST to train on, and 10 to test."""
    x, y = (part[:50] for part in mnist.load().test)
    return (x[:40], y[:40]), (x[40:], y[40:])


def test_each_version_is_an_example_of_that_epoch():
    examples = load_examples(digits()[0], augment=f"{__name__}:changing_seven")
    x = digits()[0][0]
    for index, (original, *changed) in enumerate(augmented.versions(examples, seed=5)):
        np.testing.assert_array_equal(original, x[index])
        for epoch, version in enumerate(changed):
            trained = np.concatenate([b for b, _ in examples.batches(Epoch(16, 5, epoch))])
            assert (trained == version).all(axis=(1, 2, 3)).any()


def small():
    task = {"model": "tests.loading:model", "dataset": f"{__name__}:digits", "max_steps": 1}
    return config(run_dir="run", augment="crop_flip", **task)


def test_a_run_with_augment_draws_it_once():
    """run_test lists the files of a run without it."""
    towers.train(small())
    picture = matplotlib.image.imread("run/augmented.png")
    assert picture.shape[:2] == (588, 960) and picture[..., :3].std() > 0.1
    before = Path("run/augmented.png").stat().st_mtime_ns
    towers.train(TrainConfig(resume="run", trust_run_dir=True, max_steps=2))
    assert Path("run/augmented.png").stat().st_mtime_ns == before


def test_a_picture_that_fails_is_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(charts, "figure_file", None)
    towers.train(small())
    shown = capsys.readouterr().out
    assert "Warning   augmented.png cannot be drawn (" in shown and "Done: 1 step" in shown
