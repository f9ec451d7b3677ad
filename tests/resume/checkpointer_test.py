"""A state goes to the disk, to other workers, and comes back; whose a run directory is."""

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor

import keras
import ml_dtypes
import numpy as np
import pytest

from towers.resume import checkpointer as module, run_dir
from towers.resume.checkpointer import Checkpointer
from towers.resume.train_state import TrainState
from towers.workers.workers import Workers

STATE = {"fit": {"batch_size": 4}, "options": {"rate": 0.1}}


class Counts(keras.callbacks.Callback):
    """Remembers a number."""

    count = 0

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state


@pytest.fixture(name="directory")
def _directory(tmp_path):
    (tmp_path / run_dir.CHECKPOINTS).mkdir()
    return tmp_path


def checkpointer(directory, variables=(), *callbacks, workers=None, warn=pytest.fail, **options):
    made = Checkpointer(directory, workers or Workers(), warn, **options)
    made.hold(lambda: {"model": list(variables)}, callbacks, STATE)
    return made


def test_what_is_saved_comes_back(directory):
    variable, counts = keras.Variable([1.0, 2.0]), Counts()
    saver = checkpointer(directory, [variable], counts)
    assert saver.read() is None and saver.newest_step() is None
    saver.save_first(TrainState())
    assert saver.newest_step() == 0
    counts.count = 7
    state = TrainState(step=5, epoch=1, epoch_step=2, logs={"loss": 0.1}, history={"loss": [2.0]})
    saver.save(state)
    assert saver.wait() and saver.newest_step() == 5
    variable.assign([0.0, 0.0])
    saver = checkpointer(directory, [variable], counts := Counts())
    path, (held, _), damaged = saver.read()
    assert (path.name, held["fit"], damaged) == ("epoch-1-step-5", STATE["fit"], [])
    assert TrainState.from_json(held["position"]) == state
    saver.restore(callbacks=False)
    assert variable.numpy().tolist() == [1, 2] and counts.count == 0
    saver.restore()
    assert counts.count == 7
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
    for change in (
        lambda: None,
        (directory / run_dir.FINAL).touch,
        lambda: (directory / run_dir.CHECKPOINTS / "complete").write_text("eight"),
    ):
        change()
        saver.read()
        found.append(saver.finished_step)
    assert found == [None, 8, None]


def test_a_finish_that_cannot_be_noted_is_a_warning(directory):
    (directory / run_dir.CHECKPOINTS).rmdir()
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
    (directory / run_dir.FINAL).touch()
    chief.finish(TrainState(step=3))
    chief.read()
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


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_runs_are_numbered_after_the_highest_number_there():
    assert str(run_dir.create(None, "cnn-mnist", "{}")) == "runs/cnn-mnist-001"
    os.mkdir("runs/cnn-mnist-007")
    os.mkdir("runs/cnn-mnist-best")
    os.mkdir("runs/cnn-mnist-big-009")
    assert str(run_dir.create(None, "cnn-mnist", "{}")) == "runs/cnn-mnist-008"
    assert str(run_dir.create(None, "mlp-mnist", "{}")) == "runs/mlp-mnist-001"


def test_runs_that_start_together_get_directories_of_their_own():
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: run_dir.create(None, "cnn-mnist", "{}"), range(16)))
    assert len(set(paths)) == 16


@pytest.mark.parametrize(
    "name, expected",
    [
        ("my.models:build/../x y-mnist", "my.models_build_.._x_y-mnist-001"),
        ("../../x:f-../../y", "_.._x_f-.._.._y-001"),
        ("/etc/x:f-mnist", "_etc_x_f-mnist-001"),
        ("..", "-001"),
    ],
)
def test_a_users_model_gives_a_name_that_is_safe_for_files_and_stays_in_runs(name, expected):
    path = run_dir.create(None, name, "{}")
    assert path == run_dir.Path("runs", expected)
    assert os.listdir() == ["runs"] and os.listdir("runs") == [expected]


@pytest.mark.parametrize("check", [run_dir.check, lambda directory: None])  # found empty before
def test_a_directory_with_a_run_is_refused_with_the_resume_command(check, monkeypatch):
    run_dir.create("my run", "cnn-mnist", "first")
    monkeypatch.setattr(run_dir, "check", check)
    with pytest.raises(ValueError, match=r"\(my run\) holds a run.*continue it: resume='my run';"):
        run_dir.create("my run", "cnn-mnist", "second")
    assert (run_dir.Path("my run") / "config.json").read_text() == "first"


def test_a_directory_whose_config_was_never_written_takes_a_new_run():
    os.mkdir("mine")
    run_dir.Path("mine/config.json").touch()  # as a process that is killed, or a full disk, leaves
    run_dir.Path("mine/.config.7.tmp.json").write_text("{")
    assert run_dir.read_config("mine") is None
    run_dir.create("mine", "n", "{}")
    assert run_dir.read_config("mine") == "{}"


@pytest.mark.parametrize(
    ("directory", "words"),
    [
        ("mine", "is not empty; name a new directory"),
        ("mine/notes", "is a file"),
        ("mine/notes/x", "cannot be used: Not a directory"),
    ],
)
def test_a_place_that_holds_something_else_is_refused(directory, words):
    os.mkdir("mine")
    run_dir.Path("mine/notes").touch()
    with pytest.raises(ValueError, match=rf"run_dir \({directory}\) {words}"):
        run_dir.create(directory, "n", "{}")
    assert os.listdir("mine") == ["notes"]


def test_a_directory_that_cannot_be_made_is_refused(monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ValueError, match=r"run_dir \(runs\) cannot be used: Permission denied"):
        run_dir.create(None, "n", "{}")


def test_a_write_that_fails_leaves_the_old_contents_and_no_other_file():
    path = run_dir.Path("file.txt")
    run_dir.write_atomically(path, lambda file: file.write_text("old"))

    def fail_half_way(file):
        file.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run_dir.write_atomically(path, fail_half_way)
    assert path.read_text() == "old"
    assert os.listdir() == ["file.txt"]


def test_the_temporary_file_keeps_the_suffix_that_keras_looks_at():
    names = []
    run_dir.write_atomically(
        run_dir.Path("best.keras"), lambda file: (names.append(file.name), file.touch())
    )
    assert names[0] != "best.keras" and names[0].endswith(".keras")


def test_results_have_one_header_and_a_row_an_epoch():
    path = run_dir.Path("results.csv")
    rows = [
        [1, 0.5, 0.25, 1 / 3, 12.0, 3912.5, "1a2b3c4d"],
        [2.0, float("nan"), 0.25, 1e-9, 12.0, 3912.5, "5e6f7a8b"],
    ]
    run_dir.write_results(path, ["loss", "accuracy", "val_loss"], rows)
    assert path.read_text().splitlines() == [
        "epoch,loss,accuracy,val_loss,seconds,examples_per_second,digest",
        "1,0.5,0.25,0.333333,12,3912.5,1a2b3c4d",
        "2,nan,0.25,1e-09,12,3912.5,5e6f7a8b",
    ]


def test_what_a_killed_process_left_goes_and_nothing_else():
    for name in (".best.5.tmp.keras", ".results.5.tmp.csv", "best.keras", "results.csv", ".mine"):
        run_dir.Path(name).touch()
    run_dir.remove_temporary_files(run_dir.Path("."))
    assert sorted(os.listdir()) == [".mine", "best.keras", "results.csv"]


def test_a_forked_child_that_outlives_the_run_does_not_hold_its_lock(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    try:
        with run_dir.locked(tmp_path):
            child.start()
            time.sleep(0.5)  # the child has left the lock
            with pytest.raises(ValueError, match=f"process {os.getpid()} trains there"):
                with run_dir.locked(tmp_path):
                    pytest.fail("two runs in one directory")
        with run_dir.locked(tmp_path):
            assert child.is_alive()
    finally:
        child.kill()
        child.join()
