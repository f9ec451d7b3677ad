"""Keras' callbacks are told what Keras' own loop would tell them, and may end the run."""

import keras
import pytest

from tests.app.loop_test import config
from tests.results import classifier_result
from towers.resume.best import Monitor
from towers.resume.train_state import TrainState
from towers.app.training.build import build
from towers.app.training.callbacks import Callbacks, load
from towers.app.training.epochs import evaluate

pytestmark = pytest.mark.light  # not about updates or curves

RESULT = classifier_result(2, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0)


class Recorder(keras.callbacks.Callback):
    """Notes all that it is told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def on_train_begin(self, logs=None):
        self.told.append("train begin")
        self.model.stop_training = True  # whoever was told so before: a run that begins goes on

    def on_epoch_begin(self, epoch, logs=None):
        self.told.append(f"epoch {epoch} begin, {len(self.model.history.epoch)} before")

    def on_train_batch_begin(self, batch, logs=None):
        self.told.append(f"batch {batch} begin")

    def on_train_batch_end(self, batch, logs=None):
        self.told.append((f"batch {batch} end", dict(logs)))

    def on_test_begin(self, logs=None):
        self.told.append("test begin")

    def on_test_batch_begin(self, batch, logs=None):
        self.told.append(f"test batch {batch} begin")

    def on_test_batch_end(self, batch, logs=None):
        self.told.append((f"test batch {batch} end", dict(logs)))

    def on_test_end(self, logs=None):
        self.told.append(("test end", dict(logs)))

    def on_epoch_end(self, epoch, logs=None):
        self.told.append(f"epoch {epoch} end")
        logs["mine"] = 7.0

    def on_train_end(self, logs=None):
        self.told.append(("train end", dict(logs)))


def backups():
    return [keras.callbacks.BackupAndRestore("backup")]


def two_callbacks():
    return [Recorder(), keras.callbacks.TerminateOnNaN()]


def one_callback():
    return Recorder()


def classes():
    return [Recorder]


def test_a_users_function_brings_callbacks():
    first, second = load("tests.app.training.callbacks_test:two_callbacks")
    assert isinstance(first, Recorder) and isinstance(second, keras.callbacks.TerminateOnNaN)
    assert load(None) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{__name__}:one_callback", r"returned Recorder; it must be a list of keras"),
        (f"{__name__}:classes", r"returned <class .*Recorder'>, which is no keras"),
        (f"{__name__}:backups", r"returned a BackupAndRestore, .*leave BackupAndRestore out"),
        ("tests.app.training.callbacks_test:none", "has no function 'none'"),
    ],
)
def test_what_brings_no_callbacks_is_refused(spec, message):
    with pytest.raises(ValueError, match=rf"callbacks \('{spec}'\).*{message}"):
        load(spec)


@pytest.fixture(name="run", scope="module")
def _run():
    """4 steps an epoch."""
    return build(config(epochs=2))


def listener_of(run, *callbacks, **train_state):
    train_state = TrainState(**train_state)
    return train_state, Callbacks(callbacks, run, train_state)


def test_a_run_that_goes_on_in_mid_epoch_begins_that_epoch_first(run):
    recorder = Recorder()
    train_state, listener = listener_of(
        run, recorder, step=6, epoch=1, epoch_step=2, history={"loss": [1.0]}
    )
    listener.begin()
    listener.begin_epoch()
    listener.begin_step()
    train_state.add_step({"loss": 0.25})
    listener.end_step()
    logs = {"loss": 0.5}
    train_state.end_epoch(RESULT, {**logs, "val_loss": 1.0, "val_accuracy": 0.5}, Monitor())
    listener.end_epoch(RESULT, logs)
    listener.end()
    assert recorder.told == [
        "train begin", "epoch 1 begin, 1 before", "batch 2 begin", ("batch 2 end", {"loss": 0.25}),
        "epoch 1 end", ("train end", {"loss": 0.5}),
    ]
    assert train_state.history == {"loss": [1.0, 0.5], "mine": [7.0]}


def test_each_epoch_begins_once(run):
    recorder = Recorder()
    _, listener = listener_of(run, recorder)
    listener.begin()
    listener.begin_epoch()
    assert recorder.told == ["train begin", "epoch 0 begin, 0 before"]


def test_callbacks_hear_of_the_validation(run):
    recorder = Recorder()
    _, listener = listener_of(run, recorder)
    listener.begin()
    evaluate(run, listener=listener)
    told = recorder.told[1:]
    assert told[0] == "test begin" and told[1] == "test batch 0 begin"
    (name, logs), (last_name, last), (end_name, end) = told[2], told[4], told[5]
    assert [name, told[3], last_name, end_name] == [
        "test batch 0 end", "test batch 1 begin", "test batch 1 end", "test end"
    ]
    assert set(logs) == {"loss", "accuracy"} and end == last


def test_a_callback_ends_the_run(run):
    train_state, listener = listener_of(run, step=4, epoch=0, epoch_step=4)
    listener.begin()
    assert run.step.model.stop_training is False
    run.step.model.stop_training = True
    listener.begin_validation()
    assert not train_state.stopped  # a complete epoch: its callbacks have not seen it yet
    listener.end_epoch(RESULT, {"loss": 0.5})
    assert train_state.stopped


def test_a_callback_ends_the_run_in_mid_epoch(run):
    train_state, listener = listener_of(run, step=2, epoch=0, epoch_step=2)
    listener.begin()
    run.step.model.stop_training = True
    listener.begin_validation()
    assert train_state.stopped


def test_without_callbacks_there_is_keras_history(run):
    train_state, listener = listener_of(run)
    listener.begin()
    listener.begin_epoch()
    listener.begin_step()
    listener.end_step()
    listener.end_epoch(RESULT, {"loss": 0.5})
    assert train_state.history == run.step.model.history.history == {"loss": [0.5]}
