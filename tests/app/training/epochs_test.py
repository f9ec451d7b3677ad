"""Epochs, steps and validation: in which order listeners are told, and where a run goes on."""

import keras
import numpy as np
import pytest

from tests.app.loop_test import config
from towers.resume.best import Monitor
from towers.resume.train_state import TrainState
from towers.machine.signals import Pending, StopRequested
from towers.step.nonfinite import NonFiniteError
from towers.app.training.build import build
from towers.app.training.epochs import Epochs, evaluate, num_steps
from towers.app.training.listener import Listener
from towers.app.training.pace import Pace

pytestmark = pytest.mark.light  # not about updates or curves

STEP = ["begin_step", "end_step"]
VALIDATION = [  # 20 = 16 + 4
    "begin_validation", "begin_test", *2 * ["begin_test_step", "end_test_step"], "end_test",
]
EPOCH = ["begin_epoch", *STEP, *3 * ["between_steps", *STEP], *VALIDATION, "end_epoch"]


class Recorder(Listener):
    """Notes what it is told; does something at one of the moments."""

    def __init__(self, moment=None, action=lambda: None):
        self.told = []
        self._moment, self._action = moment, action

    def __getattribute__(self, name):
        if name.startswith("_") or name == "told":
            return super().__getattribute__(name)

        def tell(*arguments):
            self.told.append(name)
            if name == self._moment:
                self._action()

        return tell


@pytest.fixture(name="run", scope="module")
def _run():
    """4 steps an epoch: 50 = 3 x 16 + 2."""
    return build(config(epochs=2))


def train(run, listener, train_state=None, pending=None):
    train_state = TrainState() if train_state is None else train_state
    run.step.model.stop_training = False
    pace = Pace(num_steps(run) - train_state.step, 2)
    Epochs(run, train_state, pace, listener, Pending() if pending is None else pending).train()
    return train_state


def test_the_moments_of_a_run_come_in_order(run):
    listener = Recorder()
    train_state = train(run, listener)
    assert listener.told == ["begin", *EPOCH, *EPOCH, "end"]
    assert (train_state.step, train_state.epoch, train_state.epoch_step) == (8, 2, 0)
    assert [row[0] for row in train_state.results] == [1, 2]
    assert sorted(train_state.history) == ["accuracy", "loss", "val_accuracy", "val_loss"]


def test_an_epoch_goes_on_where_it_was(run):
    listener = Recorder()
    train_state = train(run, listener, TrainState(step=7, epoch=1, epoch_step=3))
    assert listener.told == ["begin", "begin_epoch", *STEP, *VALIDATION, "end_epoch", "end"]
    assert (train_state.step, train_state.epoch) == (8, 2)


def test_an_epoch_goes_on_with_its_validation(run):
    listener, logs = Recorder(), {"loss": 1.0, "accuracy": 0.5}
    train_state = train(run, listener, TrainState(step=8, epoch=1, epoch_step=4, logs=logs))
    assert listener.told == ["begin", "begin_epoch", *VALIDATION, "end_epoch", "end"]
    assert train_state.history["loss"] == [1.0] and len(train_state.history["val_loss"]) == 1


def test_the_last_epoch_may_be_a_partial_one(run):
    limited = run._replace(config=config(epochs=2, max_steps=6))
    assert num_steps(limited) == 6
    listener = Recorder()
    train_state = train(limited, listener)
    partial = ["begin_epoch", *STEP, "between_steps", *STEP, *VALIDATION, "end_epoch"]
    assert listener.told == ["begin", *EPOCH, *partial, "end"]
    assert (train_state.step, train_state.epoch) == (6, 2)


def test_stop_training_ends_an_epoch_and_the_run(run):
    model = run.step.model
    train_state = TrainState()

    def stop():
        model.stop_training = train_state.stopped = train_state.step == 2

    listener = Recorder("end_step", stop)
    train(run, listener, train_state)
    assert listener.told[-10:] == ["end_step", *VALIDATION, "end_epoch", "end"]
    assert (train_state.step, train_state.epoch) == (2, 1)


def test_a_stop_before_an_epoch_leaves_its_first_step_as_in_keras(run):
    train_state = TrainState()

    def stop():
        run.step.model.stop_training = train_state.stopped = True

    listener = Recorder("begin_epoch", stop)
    train(run, listener, train_state)
    assert listener.told == ["begin", "begin_epoch", *STEP, *VALIDATION, "end_epoch", "end"]
    assert (train_state.step, train_state.epoch) == (1, 1)


def test_patience_ends_a_run(run):
    monitor = Monitor("val_loss", highest=False)
    patient = run._replace(config=config(epochs=9, early_stopping=1), monitor=monitor)
    rate = run.step.optimizer.learning_rate
    before = float(rate)
    rate.assign(0.0)  # nothing changes: the first epoch stays the best
    try:
        assert train(patient, Recorder()).epoch == 2
    finally:
        rate.assign(before)


@pytest.mark.parametrize(("moment", "step"), [("end_step", 1), ("end_epoch", 4)])
def test_a_signal_waits_for_the_end_of_a_step_and_listeners_are_told(run, moment, step):
    pending = Pending()
    listener = Recorder(moment, lambda: pending.receive(2, None) if pending.number is None else 0)
    train_state = TrainState()
    with pytest.raises(StopRequested):
        train(run, listener, train_state, pending)
    assert listener.told[-2:] == [moment, "stop"]
    assert train_state.step == step and not train_state.in_step


class Agreement:
    """The workers' agreement; a signal comes to this worker in the middle of the first."""

    def __init__(self, pending):
        self._pending, self._calls = pending, 0

    def all_reduce_max(self, *values):
        self._calls += 1
        if self._calls == 1:
            self._pending.receive(15, None)
        return values

    def barrier(self):
        """Nobody else ends."""


def test_a_signal_that_comes_while_workers_agree_is_obeyed_when_all_know_of_it(run):
    pending, train_state = Pending(), TrainState()
    with pytest.raises(StopRequested):
        train(run._replace(workers=Agreement(pending)), Recorder(), train_state, pending)
    assert (train_state.step, pending.number) == (2, 15)


@pytest.mark.parametrize(
    ("error", "in_step"), [(NonFiniteError("tower 0"), False), (RuntimeError("half"), True)]
)
def test_an_update_that_fails_may_have_changed_anything_but_for_one_that_was_not_made(
    run, error, in_step, monkeypatch
):
    def fail(self, x, y, placed=None):
        raise error

    monkeypatch.setattr(type(run.step), "train_batch", fail)
    listener, train_state = Recorder(), TrainState()
    with pytest.raises(type(error)):
        train(run, listener, train_state)
    assert listener.told == ["begin", "begin_epoch", "begin_step", "stop"]
    assert (train_state.step, train_state.in_step) == (0, in_step)


def test_a_listener_that_fails_at_the_beginning_is_told_of_the_stop(run):
    def fail():
        raise LookupError("mine")

    listener = Recorder("begin", fail)
    with pytest.raises(LookupError, match="mine"):
        train(run, listener)
    assert listener.told == ["begin", "stop"]


def test_evaluation_is_keras_own_and_may_be_interrupted(run):
    x, y = run.test.source.parts
    model = keras.models.clone_model(run.step.model)
    model.set_weights(run.step.model.get_weights())
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    loss, accuracy = model.evaluate(x, y, verbose=0)
    checks = []
    logs = evaluate(run, lambda: checks.append(1))
    np.testing.assert_allclose([logs["loss"], logs["accuracy"]], [loss, accuracy], rtol=1e-5)
    assert len(checks) == 2  # 20 = 16 + 4
