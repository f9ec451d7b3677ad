"""A fit reads the same batches with and without towers.Resume, and so does a resumed fit."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parallel.fits import Batches as InOrder
from tests.parallel.fits import Fits, rows
from tests.resume import loaders
from towers.resume.replay import Replay
from towers.resume.resumed_data import validation_data
from towers.resume.resumed_fit import fit_arguments


@pytest.fixture(scope="module")
def model():
    return loaders.classifier()


class Batches(InOrder):
    """In another order after each epoch; index errors show wrong indices."""

    def __getitem__(self, index):
        assert 0 <= index < len(self)
        return super().__getitem__(index)

    def on_epoch_end(self):
        order = np.random.default_rng(self.data[1][0]).permutation(25)
        self.data = tuple(part[order] for part in self.data)


class NoisyBatches(Batches):
    """Batches that draw from NumPy, and are in another order after each epoch by it."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + np.random.normal(size=x.shape), y

    def on_epoch_end(self):
        order = np.random.permutation(25)
        self.data = tuple(part[order] for part in self.data)


class Source:
    """Batches by index, of no class that Keras knows."""

    def __init__(self):
        self._batches = InOrder()

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]


def loader():
    """Its state is saved."""
    x, y = rows(28)
    return loaders.Loader(x.reshape(4, 7, 6), y.reshape(4, 7))


def shuffled():
    """Anew in each epoch, of a length that is known."""
    return tf.data.Dataset.from_tensor_slices(rows()).shuffle(25, seed=1).batch(7)


def unknown():
    """Of a length that is not known."""
    return shuffled().filter(lambda x, y: True)


def repeated():
    """Shuffles anew while it is read; a cache keeps the first half of the order."""
    first = tf.data.Dataset.from_tensor_slices(rows()).shuffle(25, seed=1).cache()
    return first.concatenate(shuffled().unbatch().repeat(2)).batch(7)


def noisy_dataset():
    """A generator whose state goes on from epoch to epoch changes the examples."""
    noise = tf.random.Generator.from_seed(1)
    return shuffled().map(lambda x, y: (x + noise.normal(tf.shape(x)), y))


def generator():
    while True:  # whole passes: TensorFlow may take a minute to delete an iterator in the midst
        yield from list(shuffled().as_numpy_iterator())


def drawn():
    """Draws from the state that a thread, which reads ahead, moves on."""
    x, y = rows()
    while True:
        chosen = np.random.randint(0, len(x), 7)
        yield x[chosen], y[chosen]


DATA = {
    "arrays": (rows, {}),
    "arrays, part by part": (rows, {"steps_per_epoch": 3}),
    "batches": (Batches, {}),
    "batches of two threads": (lambda: Batches(workers=2), {}),
    "batches of two processes": (lambda: Batches(workers=2, use_multiprocessing=True), {}),
    "batches that draw": (NoisyBatches, {}),
    "a source": (Source, {}),
    "a loader with a state": (loader, {"steps_per_epoch": 4}),
    "a dataset of unknown length": (unknown, {}),
    "a dataset that shuffles as it is read": (repeated, {}),
    "a dataset with noise": (noisy_dataset, {}),
    "an endless dataset": (lambda: shuffled().repeat(), {"steps_per_epoch": 3}),
    "a dataset, more than all": (shuffled, {"steps_per_epoch": 5}),
    "a generator": (generator, {"steps_per_epoch": 3}),
    "a generator that draws": (drawn, {"steps_per_epoch": 3}),
}


def num_warnings(recwarn):
    return sum("ran out of data" in str(recwarn.pop(UserWarning).message) for _ in recwarn.list[:])


@pytest.mark.telling(
    "batches of two threads", "batches that draw", "a loader*", "a dataset*all", "arrays*part*"
)
@pytest.mark.parametrize("name", DATA)
def test_a_fit_reads_its_data_as_without_resume_and_so_does_a_resumed_one(
    model, name, tmp_path, recwarn
):
    make, options = DATA[name]
    has_size = make is rows
    # The seed of a dataset's shuffle follows from that of the process, too.
    seeds = (1, 1) if "dataset" in name or "generator" in name else (1, 2)
    fits = Fits(
        model,
        *(rows() if has_size else [make]),
        batch_size=7 if has_size else None,
        epochs=3,
        seeds=seeds,
        **options,
    )
    recwarn.clear()
    whole = fits.fit(tmp_path / "whole")
    assert len(whole[0]["loss"]) == 3
    num_ends = num_warnings(recwarn)
    if make not in (Source, loader):  # which Keras does not take
        assert fits.plain() == whole
        assert num_warnings(recwarn) == num_ends
    assert fits.interrupted(tmp_path / "cut", [2, 4]) == whole


VALIDATION = {
    "a dataset": (shuffled, {"validation_steps": 2}),
    "a dataset that shuffles as it is read": (repeated, {}),
    "batches": (Batches, {"validation_steps": 2}),
    "batches of two threads": (lambda: Batches(workers=2), {}),
    "batches that draw": (NoisyBatches, {"validation_freq": 2}),
}


@pytest.mark.telling("batches", "a dataset")
@pytest.mark.parametrize("name", VALIDATION)
def test_validation_data_that_go_on_from_epoch_to_epoch_do_so_in_a_resumed_fit(
    model, name, tmp_path
):
    make, options = VALIDATION[name]

    def fits():
        keras.utils.set_random_seed(1)  # the seed of a dataset's shuffle follows from it, too
        return Fits(model, *rows(), epochs=4, seeds=(1, 1), validation_data=make(), **options)

    whole = fits().plain()
    assert len(set(whole[0]["val_loss"])) == len(whole[0]["val_loss"])
    for after in (5, 6):
        with pytest.raises(InterruptedError):
            fits().fit(tmp_path, after=after)
    assert fits().fit(tmp_path) == whole


def test_random_numbers_after_a_fit_do_not_depend_on_how_often_it_was_interrupted(model, tmp_path):
    """The last fit is complete when it begins."""
    fits = Fits(model, NoisyBatches, batch_size=None)
    found = []
    for run in (
        fits.plain,
        lambda: fits.fit(tmp_path / "whole"),
        lambda: fits.interrupted(tmp_path / "cut", [2, 3]),
        lambda: fits.fit(tmp_path / "cut"),
    ):
        run()
        found.append((random.random(), np.random.random()))
    assert found == found[:1] * 4


def test_data_that_this_process_has_read_cannot_resume(model, tmp_path):
    fits = Fits(model, shuffled(), batch_size=None)
    with pytest.raises(InterruptedError):
        fits.fit(tmp_path, after=5)
    with pytest.raises(ValueError, match=r"^x \(.*\) has been read by an earlier fit"):
        fits.fit(tmp_path)


@pytest.mark.parametrize(
    "make, steps", [(generator, 2), (repeated, 2), (repeated, None), (noisy_dataset, 4)]
)
def test_validation_data_that_are_read_ahead_are_warned_of(make, steps, recwarn):
    """Of a validation that reads all of its data, nothing is left to be read ahead."""
    arguments = fit_arguments(validation_data=make(), validation_steps=steps)
    validation_data(arguments, Replay(0))
    is_said = any("reads it ahead" in str(warning.message) for warning in recwarn.list)
    assert is_said == (steps == 2)
