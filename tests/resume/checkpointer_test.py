"""When a state goes to the disk, and what a checkpoint that was read allows."""

import pytest

from towers.resume import checkpointer as module, directories
from towers.resume.checkpointer import Checkpointer
from towers.resume.train_state import TrainState
from towers.workers.workers import Workers

STATE = {"fit": {"batch_size": 4}, "options": {"rate": 0.1}}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / directories.CHECKPOINTS).mkdir()
    return tmp_path


def checkpointer(directory, warn=pytest.fail, **options):
    made = Checkpointer(directory, Workers(), warn, **options)
    made.hold(dict, (), STATE)
    return made


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
