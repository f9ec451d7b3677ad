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

    def __init__(self, directory, pending, *, every=None, workers=None):
        (directory / directories.CHECKPOINTS).mkdir()
        self.model, self.state = keras.Sequential(), TrainState()
        self.model.stop_training, self.model.history = False, keras.callbacks.History()
        self.model.history.history = {}
        self._weight = keras.Variable(0.0)
        workers = workers or Workers()
        self._checkpointer = Checkpointer(directory, workers, pytest.fail, every=every)
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


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path, signals.Pending(), every=3)


def send(number):
    return lambda: os.kill(os.getpid(), number)


def test_a_step_is_saved_if_a_save_is_due_unless_the_caller_saves_soon(training):
    found = []
    for step in range(1, 7):
        training.step(saves=step != 6)
        found.append(training.saved())
    assert found == [None, None, (3, False), (3, False), (3, False), (3, False)]
    training.after.end_epoch()
    assert training.saved() == (6, False)


def test_a_stop_is_saved_at_once_and_is_not_saved_as_one_if_a_callback_takes_it_back(training):
    def stop():
        training.model.stop_training = True

    training.step(stop)
    assert training.saved() == (1, True)
    training.model.stop_training = False
    training.state.epoch += 1
    training.after.end_epoch()
    assert training.saved() == (1, False)


def test_an_epoch_that_is_cut_stays_as_its_last_step_has_left_it(training):
    training.step()
    training.after.save()
    training.after.is_cut = True
    training.state.step += 1  # whatever follows
    training.after.end_epoch()
    training.after.save(is_last=True)
    assert training.saved() == (1, False)


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_waits_for_the_end_of_the_step_which_is_saved(saves, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with signals.deferred() as pending:
            training = Training(tmp_path, pending)
            training.step()
            training.step(send(signal.SIGINT), saves=saves)
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


class Others(Workers):
    """Workers of which another has received a signal."""

    def __init__(self, signal_number=0):
        super().__init__()
        self._theirs, self.acts = signal_number, []

    def all_reduce_max(self, signal_number, stop):
        self.acts.append("agree")
        return max(signal_number, self._theirs), stop

    def barrier(self):
        self.acts.append("meet")


def test_a_signal_that_comes_while_workers_agree_is_obeyed_when_all_know_of_it(tmp_path):
    class Late(Others):
        def all_reduce_max(self, *values):
            if not self.acts:
                training.after.pending.receive(signal.SIGTERM, None)
            return super().all_reduce_max(*values)

    training = Training(tmp_path, signals.Pending(), workers=Late())
    training.step()
    with pytest.raises(signals.StopRequested):
        training.step()
    assert training.saved() == (2, False)


def test_another_workers_signal_ends_this_one_which_lets_it_go_first(tmp_path):
    pending, others = signals.Pending(), Others(signal.SIGTERM)
    training = Training(tmp_path, pending, workers=others)
    with pytest.raises(signals.StopRequested):
        training.step()
    assert (pending.number, others.acts) == (signal.SIGTERM, ["agree", "meet"])
    assert training.saved() == (1, False)
