"""The loop of train.py: what callbacks are told, what is saved when, and where a run goes on."""

import keras
import pytest

from tests.app.run_test import config
from towers.app.loop import Loop, evaluate
from towers.app.reporting.progress import Pace
from towers.app.reporting.time_spent import TimeSpent
from towers.app.training.build import build
from towers.app.training.loaded import put_in_place
from towers.machine.signals import Pending
from towers.resume.after_step import AfterStep
from towers.resume.checkpointer import Checkpointer
from towers.resume.train_state import TrainState

TEST = ["test_begin", *2 * ["test_batch_begin", "test_batch_end"], "test_end"]  # 20 = 16 + 4
STEP = ["train_batch_begin", "train_batch_end"]
EPOCH = ["epoch_begin", *4 * STEP, *TEST, "epoch_end"]


class Recorder(keras.callbacks.Callback):
    """Notes what it is told; does something at one of the moments."""

    def __init__(self, moment=None, action=lambda: None):
        super().__init__()
        self.told, self.seen, self._moment, self._action = [], {}, moment, action

    def _tell(self, name, *arguments):
        self.told.append(name)
        self.seen.setdefault(name, []).append(arguments)
        if name == self._moment:
            self._action()


for moment in ("train_begin", "train_end", "test_begin", "test_end"):
    setattr(
        Recorder, f"on_{moment}", lambda self, logs=None, m=moment: self._tell(m, dict(logs or {}))
    )
for moment in ("epoch_begin", "epoch_end", *STEP, "test_batch_begin", "test_batch_end"):
    setattr(
        Recorder,
        f"on_{moment}",
        lambda self, i, logs=None, m=moment: self._tell(m, i, dict(logs or {})),
    )


class Silent(keras.callbacks.Callback):
    """Lines that nobody sees."""

    pace, spent = Pace(8), TimeSpent()

    def end_steps(self):
        pass


class Notes(Checkpointer):
    """Notes the steps that are saved, and writes nothing."""

    def __init__(self, run, directory):
        super().__init__(directory, run.workers, pytest.fail)
        self.saved = []

    def save(self, train_state, is_last=False):
        self.saved.append(train_state.step)

    def wait(self):
        return True

    def newest_step(self):
        return self.saved[-1] if self.saved else None


@pytest.fixture(scope="module")
def run():
    """4 steps an epoch: 50 = 3 x 16 + 2."""
    return build(config(epochs=2))


@pytest.fixture
def loop_of(tmp_path):
    def make(run, *callbacks, state=None):
        notes = Notes(run, tmp_path)
        after = AfterStep(
            run.step.model,
            TrainState() if state is None else state,
            notes,
            Pending(),
            run.workers,
        )
        loop = Loop(run, after, Silent(), [], callbacks)
        return loop, notes

    return make


def test_callbacks_hear_what_keras_own_loop_tells_them(run, loop_of):
    recorder, state = Recorder(), TrainState()
    loop, notes = loop_of(run, recorder, state=state)
    loop.train()
    assert (recorder.params["epochs"], recorder.params["steps"]) == (2, 4)
    assert recorder.told == ["train_begin", *EPOCH, *EPOCH, "train_end"]
    assert [epoch for epoch, _ in recorder.seen["epoch_begin"]] == [0, 1]
    assert [batch for batch, _ in recorder.seen["train_batch_end"]] == [*range(4), *range(4)]
    (_, logs), (_, last) = recorder.seen["test_batch_end"][:2]
    assert set(logs) == {"loss", "accuracy"} and recorder.seen["test_end"][0] == (last,)
    assert set(recorder.seen["epoch_end"][1][1]) == {*run.columns}
    assert (state.step, state.epoch, state.epoch_step) == (8, 2, 0)
    assert [row[0] for row in state.results] == [1, 2]
    assert state.history == run.step.model.history.history
    assert notes.saved == [0, 4, 8, 8]  # first, each epoch, at the end


@pytest.mark.parametrize("done, left", [(3, STEP), (4, [])])
def test_an_epoch_goes_on_where_it_was_after_its_own_beginning(run, loop_of, done, left):
    recorder, logs = Recorder(), {"loss": 1.0, "accuracy": 0.5}
    state = TrainState(step=4 + done, epoch=1, epoch_step=done, logs=logs)
    loop_of(run, recorder, state=state)[0].train()
    assert recorder.told == ["train_begin", "epoch_begin", *left, *TEST, "epoch_end", "train_end"]
    assert (state.step, state.epoch) == (8, 2) and len(state.history["val_loss"]) == 1


def test_a_run_that_ends_in_mid_epoch_is_saved_for_the_last_time_before_its_validation(
    run, loop_of
):
    limited = run._replace(config=config(epochs=2, max_steps=6))
    assert limited.num_steps == 6
    state, recorder = TrainState(), Recorder()
    loop, notes = loop_of(limited, recorder, state=state)
    recorder._moment, recorder._action = "test_begin", lambda: seen.append(list(notes.saved))
    seen = []
    loop.train()
    assert recorder.told[-11:] == ["epoch_begin", *2 * STEP, *TEST, "epoch_end", "train_end"][-11:]
    assert (state.step, state.epoch) == (6, 2)
    assert seen == [[0], [0, 4, 6]] and notes.saved == [0, 4, 6]


@pytest.mark.parametrize("moment, steps", [("train_batch_end", 1), ("epoch_begin", 1)])
def test_stop_training_ends_the_epoch_and_the_run_as_in_keras(run, loop_of, moment, steps):
    def stop():
        run.step.model.stop_training = True

    recorder, state = Recorder(moment, stop), TrainState()
    loop_of(run, recorder, state=state)[0].train()
    assert recorder.told == ["train_begin", "epoch_begin", *STEP, *TEST, "epoch_end", "train_end"]
    assert (state.step, state.epoch, state.stopped) == (steps, 1, True)


def test_a_run_begins_though_a_callback_or_a_run_before_has_set_stop_training(run, loop_of):
    def stop():
        run.step.model.stop_training = True

    stop()
    state = TrainState()
    loop_of(run, Recorder("train_begin", stop), state=state)[0].train()
    assert state.step == 8


def test_nothing_is_saved_of_a_run_that_has_not_begun(run, loop_of):
    def fail():
        raise LookupError("mine")

    loop, notes = loop_of(run, Recorder("train_begin", fail))
    with pytest.raises(LookupError, match="mine"):
        loop.train()
    assert loop.stop() == "" and notes.saved == []


def test_an_evaluation_may_be_interrupted_before_each_batch(run):
    """run_test measures its values."""
    checks = []
    evaluate(run, check=lambda: checks.append(1))
    assert len(checks) == 2  # 20 = 16 + 4


@pytest.mark.parametrize("resume, is_left", [(None, False), ("run", True)])
def test_a_run_without_a_first_checkpoint_leaves_no_directory_that_it_has_made(
    resume, is_left, run, tmp_path
):
    """There is no checkpoints/ to write into."""
    directory = tmp_path / "run"
    directory.mkdir()
    run = run._replace(config=config(resume=resume))
    checkpointer = Checkpointer(directory, run.workers, pytest.fail)
    with pytest.raises(ValueError, match=r"run_dir .* no checkpoint can be written: .*No such fil"):
        put_in_place(run, TrainState(), checkpointer)
    assert directory.exists() == is_left
