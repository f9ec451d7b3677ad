"""Synthetic examples: any shape, the same bits for a seed, and something to learn."""

import numpy as np
import pytest

from tests.loading import load, refusal
from towers.app.datasets import synthetic


def test_synthetic_takes_shape_and_classes_from_the_caller():
    dataset = load("synthetic")
    (x, y), (x_test, _) = dataset.train, dataset.test
    assert x.shape == (8192, 3, 2) and x_test.shape == (1024, 3, 2)
    assert x.dtype == np.float32 and y.dtype == np.int32
    assert 0 <= x.min() and x.max() < 1 and set(y) == {0, 1, 2, 3}


def test_synthetic_gives_the_same_bits_for_the_same_seed_only():
    first, again, other = (synthetic.load((9,), 3, 20, 20, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.train[0], again.train[0])
    np.testing.assert_array_equal(first.test[1], again.test[1])
    assert not np.array_equal(first.train[0], other.train[0])
    assert not np.array_equal(first.train[0], first.test[0])


def test_synthetic_images_of_imagenets_size_take_a_gigabyte_at_most(monkeypatch):
    monkeypatch.setattr(synthetic, "make_split", lambda prototypes, count, generator: count)
    dataset = synthetic.load((224, 224, 3), 2)
    assert dataset.train == 2**30 // (4 * 224 * 224 * 3) == 1783 and dataset.test == 222


@pytest.mark.parametrize("bad", [((0,), 2), ((2,), 0), ((2,), 2, 0), ((2,), 2, 1, 1, -1)])
def test_synthetic_refuses_counts_below_1_and_a_negative_seed(bad):
    assert "must be at least 1, and seed" in refusal(synthetic.load, *bad)
