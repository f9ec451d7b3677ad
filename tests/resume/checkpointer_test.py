"""A state goes to the disk, to other workers, and comes back."""

import keras
import ml_dtypes
import numpy as np
import pytest

from tests.parallel.fits import Remembers
from towers.resume import checkpointer as module, directories
from towers.resume.checkpointer import Checkpointer
from towers.resume.train_state import TrainState
from towers.workers.workers import Workers

STATE = {"fit": {"batch_size": 4}, "options": {"rate": 0.1}}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / directories.CHECKPOINTS).mkdir()
    return tmp_path


def checkpointer(directory, variables=(), *callbacks, workers=None, warn=pytest.fail, **options):
    made = Checkpointer(directory, workers or Workers(), warn, **options)
    made.hold(lambda: {"model": list(variables)}, callbacks, STATE)
    return made


def test_what_is_saved_comes_back(directory):
    variable, counts = keras.Variable([1.0, 2.0]), Remembers(0)
    saver = checkpointer(directory, [variable], counts)
    assert saver.read() is None and saver.newest_step() is None
    saver.save_first(TrainState())
    assert saver.newest_step() == 0
    counts.value = 7
    state = TrainState(step=5, epoch=1, epoch_step=2, logs={"loss": 0.1}, history={"loss": [2.0]})
    saver.save(state)
    assert saver.wait() and saver.newest_step() == 5
    variable.assign([0.0, 0.0])
    saver = checkpointer(directory, [variable], counts := Remembers(0))
    path, (held, _), damaged = saver.read()
    assert (path.name, held["fit"], damaged) == ("epoch-1-step-5", STATE["fit"], [])
    assert TrainState.from_json(held["position"]) == state
    saver.restore(callbacks=False)
    assert variable.numpy().tolist() == [1, 2] and counts.value == 0
    saver.restore()
    assert counts.value == 7
    saver.found = None
    variable.assign([3.0, 3.0])
    saver.restore()
    assert variable.numpy().tolist() == [3, 3]


def test_another_identity_is_refused_with_what_differs(directory):
    saver = checkpointer(directory)
    saver.save_first(TrainState())
    saver.read()
    saver.check_same(STATE["fit"], {"batch_size": 4}, {"rate": 0.1}, "fit", "Or not.")
    with pytest.raises(ValueError) as caught:
        saver.check_same(
            STATE["fit"], {"batch_size": 5, "shuffle": True}, {"rate": 0.1}, "fit", "Or not."
        )
    assert str(caught.value).endswith(
        "epoch-0-step-0 belongs to another fit: batch_size (4 then, 5 now), shuffle (None then, "
        "True now). Or not."
    )


def test_a_checkpoint_of_an_earlier_version_continues_with_a_line_that_says_so(directory):
    """Its batch_norm was by default "average"; a state without ARITHMETIC is of such a version."""
    told = []
    saver = checkpointer(directory)
    saver.warn = told.append
    saver.save_first(TrainState())
    saver.read()
    then, now = ({**STATE["fit"], "batch_norm": how} for how in ("average", "synchronized"))
    with pytest.raises(ValueError, match="batch_norm"):
        saver.check_same(then, now, {"rate": 0.1}, "fit", "Or not.")
    del saver.found.checkpoint.state[module.ARITHMETIC]
    saver.check_same(then, now, {"rate": 0.1}, "fit", "Or not.")
    (line,) = told
    assert "earlier version" in line and "batch_norm=synchronized" in line


def test_it_is_due_after_so_many_updates(directory):
    saver = checkpointer(directory, every=3)
    steps = [0, 1, 2, 3, 5, 6, 10]  # of several in one execution, the last
    due = [now for before, now in zip(steps, steps[1:], strict=False) if saver.is_due(now, before)]
    assert due == [3, 6, 10]


def test_it_is_due_at_least_once_in_ten_minutes(directory, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    saver, due = checkpointer(directory), []
    for step in range(1, 8):
        now[0] += 250
        if saver.is_due(step, step - 1):
            due.append(step)
            saver.save(TrainState(step=step))
    assert due == [3, 6]


def test_a_run_is_finished_with_its_final_model_only(directory):
    saver = checkpointer(directory)
    saver.finish(TrainState(step=8))
    found = []
    for has_final in (False, True):
        saver.read(has_final=has_final)
        found.append(saver.finished_step)
    (directory / directories.CHECKPOINTS / "complete").write_text("eight")
    saver.read(has_final=True)
    assert [*found, saver.finished_step] == [None, 8, None]


def test_a_finish_that_cannot_be_noted_is_a_warning(directory):
    (directory / directories.CHECKPOINTS).rmdir()
    warnings = []
    checkpointer(directory, warn=warnings.append).finish(TrainState())
    assert warnings == [f"{directory}/checkpoints cannot be written (No such file or directory)."]


class Wire:
    """The chief's `Workers` until `turn`, then worker 1's, which hears what the chief told."""

    num_workers, is_chief = 2, True

    def __init__(self):
        self.told = []

    def turn(self):
        self.is_chief = False

    def broadcast(self, data):
        if self.is_chief:
            self.told.append(data)
            return data
        return self.told.pop(0)


VALUES = {
    "transposed": np.arange(6, dtype="float32").reshape(2, 3).T,  # not contiguous
    "number": np.array(3, "int64"),
    "bfloat16": np.array([0.5, -1.5], ml_dtypes.bfloat16),
}


def test_another_worker_has_what_the_chief_has_read_bit_for_bit_and_leaves_no_file(directory):
    variables = [keras.Variable(value, dtype=value.dtype.name) for value in VALUES.values()]
    wire = Wire()
    chief = checkpointer(directory, variables, workers=wire)
    chief.save_first(TrainState(step=3, epoch_step=3))
    chief.finish(TrainState(step=3))
    chief.read(has_final=True)
    wire.turn()
    for variable in variables:
        variable.assign(np.zeros_like(variable.numpy()))
    other = checkpointer(directory / "own", variables, workers=wire)
    found = other.read()
    assert (found.path, other.finished_step) == (chief.found.path, 3)
    other.restore()
    assert [v.numpy().tobytes() for v in variables] == [v.tobytes() for v in VALUES.values()]
    other.save(TrainState(step=4))
    assert other.wait() and other.newest_step() is None and not (directory / "own").exists()


def test_of_a_new_run_another_worker_hears_that_there_is_nothing(directory):
    wire = Wire()
    checkpointer(directory).save_first(TrainState())
    assert checkpointer(directory, workers=wire).read(resume=False) is None
    wire.turn()
    assert checkpointer(directory, workers=wire).read(resume=False) is None and wire.told == []
