"""What follows a step: workers agree, a save that is due is made, a signal is obeyed, in turn."""

import os
import signal

import keras
import pytest

from towers.machine import signals
from towers.resume import directories
from towers.resume.after_step import AfterStep
from towers.resume.checkpointer import Checkpointer
from towers.resume.train_state import TrainState
from towers.workers.workers import Workers


class Training:
    """A model, its position and the checkpoints of a directory, without batches and updates."""

    def __init__(self, directory, pending, workers=None):
        (directory / directories.CHECKPOINTS).mkdir()
        self.model, self.state = keras.Sequential(), TrainState()
        self.model.stop_training, self.model.history = False, keras.callbacks.History()
        self.model.history.history = {}
        self._weight = keras.Variable(0.0)
        workers = workers or Workers()
        self._checkpointer = Checkpointer(directory, workers, pytest.fail)
        self._checkpointer.hold(lambda: {"model": [self._weight]}, (), {"options": {}})
        self.after = AfterStep(self.model, self.state, self._checkpointer, pending, workers)

    def step(self, callback=lambda: None, **options):
        self._weight.assign_add(1.0)
        self.state.add_step({"loss": 0.5})
        callback()
        self.after.end_step(self.state.step - 1, **options)

    def saved(self):
        """(the newest checkpoint's step, its weight, its `stopped`); None without a checkpoint."""
        self._checkpointer.wait()
        found = self._checkpointer.read()
        if found is None:
            return None
        (weight,) = found.checkpoint.arrays.values()
        position = found.checkpoint.state["position"]
        assert position["step"] == weight  # both are of one moment
        return position["step"], position["stopped"]


def send(number):
    return lambda: os.kill(os.getpid(), number)


def test_a_stop_is_saved_at_once_and_is_not_saved_as_one_if_a_callback_takes_it_back(tmp_path):
    training = Training(tmp_path, signals.Pending())

    def stop():
        training.model.stop_training = True

    training.step(stop)
    assert training.saved() == (1, True)
    training.model.stop_training = False
    training.state.epoch += 1
    training.after.end_epoch()
    assert training.saved() == (1, False)


def test_a_signal_saves_the_step_even_if_the_caller_saves_soon(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with signals.deferred() as pending:
            training = Training(tmp_path, pending)
            training.step()
            training.step(send(signal.SIGINT), saves=False)
            raise AssertionError("another batch is drawn")
    assert training.saved() == (2, False)


def test_a_signal_in_a_validation_ends_it_and_saves_nothing_of_it(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with signals.deferred() as pending:
            training = Training(tmp_path, pending)
            training.after.obey()
            send(signal.SIGINT)()
            training.after.obey()
            raise AssertionError("another batch is drawn")
    assert training.saved() is None


def test_a_signal_that_comes_while_workers_agree_is_obeyed_when_all_know_of_it(tmp_path):
    class Late(Workers):
        def all_reduce_max(self, *values):
            if training.state.step == 1:
                training.after.pending.receive(signal.SIGTERM, None)
            return values

    training = Training(tmp_path, signals.Pending(), Late())
    training.step()
    with pytest.raises(signals.StopRequested):
        training.step()
    assert training.saved() == (2, False)
