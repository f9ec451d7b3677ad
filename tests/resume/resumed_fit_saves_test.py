"""Whom a fit that goes on tells of what, and when it saves."""

import keras
import pytest

from tests.parallel.fits import Fits, classifier, rows
from towers.resume import checkpointer, checkpoints


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.events = []

    def on_epoch_begin(self, epoch, logs=None):
        self.events.append(f"epoch {epoch}")

    def on_train_batch_begin(self, batch, logs=None):
        self.events.append(f"begin {batch}")

    def on_train_batch_end(self, batch, logs=None):
        self.events.append(f"end {batch}")


@pytest.fixture(scope="module")
def model():
    return classifier()


def names(directory):
    return [path.name for path in reversed(checkpoints.find(directory / "checkpoints"))]


def test_callbacks_hear_of_the_steps_that_are_left_alone(model, tmp_path):
    recorders = []

    def callbacks():
        recorders.append(Recorder())
        return recorders[-1:]

    fits = Fits(model, *rows(), callbacks=callbacks)
    fits.interrupted(tmp_path, [6])
    left = ["begin 2", "end 2", "begin 3", "end 3"]
    assert recorders[-1].events == ["epoch 1", *left]
    assert recorders[-2].events[-2:] == ["end 1", "begin 2"]


@pytest.mark.parametrize("every, expected", [
    (3, ["epoch-0-step-3", "epoch-1-step-4", "epoch-1-step-6"]),
    (None, ["epoch-0-step-0", "epoch-1-step-4"]),
])
def test_it_saves_after_so_many_steps_and_each_epoch(model, every, expected, tmp_path):
    fits = Fits(model, *rows())
    with pytest.raises(InterruptedError):
        fits.fit(tmp_path, after=7, every=every)
    assert names(tmp_path) == expected


def test_without_a_number_it_saves_when_time_has_passed(model, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "SECONDS_BETWEEN_SAVES", 0.0)
    with pytest.raises(InterruptedError):
        Fits(model, *rows()).fit(tmp_path, after=3, every=None)
    assert names(tmp_path) == ["epoch-0-step-1", "epoch-0-step-2", "epoch-0-step-3"]


def test_a_first_checkpoint_that_cannot_be_written_ends_the_fit(model, tmp_path, monkeypatch):
    def full(path, checkpoint):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write", full)
    with pytest.raises(ValueError, match="^directory .* no checkpoint can be .*: .*No space left"):
        Fits(model, *rows()).fit(tmp_path)


def test_a_later_checkpoint_that_cannot_be_written_is_a_warning(model, tmp_path, monkeypatch):
    write = checkpoints.write

    def full(path, checkpoint):
        if path.name != "epoch-0-step-0":
            raise OSError(28, "No space left on device")
        write(path, checkpoint)

    monkeypatch.setattr(checkpoints, "write", full)
    with pytest.warns(UserWarning, match="No space left on device.; training goes on"):
        history, *_ = Fits(model, *rows()).fit(tmp_path)
    assert len(history["loss"]) == 2
