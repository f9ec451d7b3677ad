"""A sweep's directory: whose it is, and who works in it."""

import json
import os
import subprocess
import sys

import pytest

from towers.app.config import TrainConfig
from towers.app.sweep import directory


def enter(path, **values):
    with directory.opened(path, TrainConfig(**values)):
        return sorted(os.listdir(path))


def test_a_new_sweeps_directory_holds_its_settings_and_a_place_for_cells(tmp_path):
    assert enter(tmp_path / "new" / "one", epochs=3) == ["cells", "sweep.json"]
    settings = json.loads((tmp_path / "new" / "one" / "sweep.json").read_text())
    assert settings["epochs"] == 3


def test_the_same_sweep_goes_on_and_another_is_refused_with_what_differs(tmp_path):
    enter(tmp_path, epochs=3, seed=1)
    before = (tmp_path / "sweep.json").read_bytes()
    enter(tmp_path, epochs=3, seed=1)
    with pytest.raises(ValueError, match=r"other settings: epochs \(3 there, 4 now\)\. Give"):
        enter(tmp_path, epochs=4, seed=1)
    assert (tmp_path / "sweep.json").read_bytes() == before


def test_a_setting_younger_than_the_sweep_had_its_default_there(tmp_path):
    enter(tmp_path)
    settings = json.loads((tmp_path / "sweep.json").read_text())
    del settings["seed"]
    (tmp_path / "sweep.json").write_text(json.dumps(settings))
    enter(tmp_path)
    with pytest.raises(ValueError, match=": seed "):
        enter(tmp_path, seed=5)


def test_a_directory_of_something_else_is_left_as_it_is(tmp_path):
    (tmp_path / "letter.txt").touch()
    with pytest.raises(ValueError, match="is not empty and holds no sweep"):
        enter(tmp_path)
    assert os.listdir(tmp_path) == ["letter.txt"]


def test_the_lock_ends_with_the_process_that_held_it(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from towers.app.config import TrainConfig
from towers.app.sweep.directory import opened
with opened(Path({str(tmp_path)!r}), TrainConfig()):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert "cells" in enter(tmp_path)


@pytest.mark.parametrize("text", ["[1, 2]", "3"])
def test_settings_that_are_no_object_are_refused(text, tmp_path):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ValueError, match=r"sweep.json is damaged \(no object\)"):
        enter(tmp_path)


def test_two_sweeps_in_one_directory_are_refused(tmp_path):
    with directory.opened(tmp_path / "out", TrainConfig()):
        with pytest.raises(ValueError, match=r"out_dir \(.*out\) is in use by another sweep"):
            enter(tmp_path / "out")


def test_a_damaged_settings_file_is_refused(tmp_path):
    (tmp_path / "sweep.json").write_text('{"model"')
    with pytest.raises(ValueError, match=r"sweep.json is damaged \(.*\); name another `out_dir`"):
        enter(tmp_path)
