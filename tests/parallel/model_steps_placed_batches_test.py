"""A fit whose shards reach their devices a step ahead, as on GPUs: same bits, data and errors."""

import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.parallel import fits
from towers.machine.devices import REHEARSAL


@pytest.fixture(autouse=True)
def _as_on_gpus(monkeypatch):
    monkeypatch.setenv(REHEARSAL, "1")


def rows(count=43):
    weights = np.random.default_rng(1).random(count).astype("float32")
    return *fits.rows(count), weights


def fitted(model):
    x, y, weights = rows()
    history = model.fit(x, y, sample_weight=weights, batch_size=10, epochs=2, verbose=0).history
    return history, [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


@functools.cache
def trained():
    """(a model that the tests train further, what it was after its first fit)."""
    model = fits.classifier([1, 2, 3])
    return model, fitted(model)


def fit(*data, **options):
    """The number of steps of another fit."""
    model, _ = trained()
    before = int(model.optimizer.iterations)
    model.fit(*data, verbose=0, **options)
    return int(model.optimizer.iterations) - before


def test_a_fit_has_the_bits_of_one_whose_step_splits_the_batch():
    """Keras' own function makes several steps at once, and places nothing ahead."""
    np.testing.assert_equal(trained()[1], fitted(fits.classifier([1, 2, 3], steps_per_execution=5)))


def test_an_endless_iterator_continues_in_the_next_epoch_and_other_data_start_again(tmp_path):
    """After each fit nothing reads ahead any more."""
    x, y, weights = rows(40)
    endless = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(10).repeat()
    before = set(threading.enumerate())
    callbacks = [towers.Resume(tmp_path)]
    assert fit(endless, steps_per_epoch=3, epochs=3, callbacks=callbacks) == 3 * 3
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if "ThreadPoolExecutor" in thread.name]
    assert fit(x, y, sample_weight=weights, batch_size=10) == 4


def test_an_error_of_the_data_comes_after_the_steps_before_it():
    def failing():
        yield rows(8)
        yield rows(8)
        raise OSError("the disk is broken")

    spec = tuple(tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in rows(1))
    broken = tf.data.Dataset.from_generator(failing, output_signature=spec)
    model, _ = trained()
    before = int(model.optimizer.iterations)
    with pytest.raises(tf.errors.OpError, match="the disk is broken"):
        model.fit(broken, verbose=0)
    assert int(model.optimizer.iterations) == before + 2
