"""Whose a run directory is, and what it says of the run."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from towers.app import run_dir

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


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
    "directory, words",
    [
        ("mine", "is not empty; name a new directory"),
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
