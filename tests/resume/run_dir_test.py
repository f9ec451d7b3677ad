"""The run directory: whose it is, what it refuses, and files that are never half-written."""

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from towers.resume import run_dir


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


@pytest.mark.parametrize("name, expected", [
    ("my.models:build/../x y-mnist", "my.models_build_.._x_y-mnist-001"),
    ("../../x:f-../../y", "_.._x_f-.._.._y-001"),
    ("/etc/x:f-mnist", "_etc_x_f-mnist-001"),
    ("..", "-001"),
])
def test_a_users_model_gives_a_name_that_is_safe_for_files_and_stays_in_runs(name, expected):
    path = run_dir.create(None, name, "{}")
    assert path == run_dir.Path("runs", expected)
    assert os.listdir() == ["runs"] and os.listdir("runs") == [expected]


@pytest.mark.parametrize("function", [run_dir.check, lambda d: run_dir.create(d, "n", "{}")])
def test_a_directory_with_a_run_is_refused_with_the_resume_command(function):
    run_dir.create("mine", "cnn-mnist", "first")
    with pytest.raises(ValueError, match=r"\(mine\) holds a run.*continue it: resume=mine;"):
        function("mine")
    assert (run_dir.Path("mine") / "config.json").read_text() == "first"


def test_of_two_processes_that_both_find_a_directory_empty_one_gets_it(monkeypatch):
    monkeypatch.setattr(run_dir, "check", lambda directory: None)
    run_dir.create("mine", "cnn-mnist", "first")
    with pytest.raises(ValueError, match="holds a run"):
        run_dir.create("mine", "cnn-mnist", "second")
    assert (run_dir.Path("mine") / "config.json").read_text() == "first"


@pytest.mark.parametrize(("directory", "words"), [
    ("mine", "is not empty; name a new directory"),
    ("mine/notes", "is a file"),
    ("mine/notes/x", "cannot be used: Not a directory"),
])
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
        [2.0, float("nan"), 0.25, 1e-9, 12.0, 3912.5],  # older
    ]
    run_dir.write_results(path, ["loss", "accuracy", "val_loss"], rows)
    assert path.read_text().splitlines() == [
        "epoch,loss,accuracy,val_loss,seconds,examples_per_second,digest",
        "1,0.5,0.25,0.333333,12,3912.5,1a2b3c4d",
        "2,nan,0.25,1e-09,12,3912.5,",
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
