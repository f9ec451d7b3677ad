"""Looking at somebody's run runs no code that lies in its directory, unless one asks for it."""

import dataclasses

import pytest

from towers.after_training.model_files import file_config
from towers.checkpointing.continued import continued_config
from towers.config import TrainConfig

NAMED = TrainConfig(model="theirs:model", dataset="mnist")


@pytest.fixture
def run(tmp_path, monkeypatch):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.json").write_text(NAMED.to_json())
    (directory / "theirs.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(directory)
    return directory


def test_a_module_beside_the_config_that_names_it_is_refused_by_its_file(run):
    with pytest.raises(ValueError) as caught:
        continued_config(".", {})
    text = str(caught.value)
    assert "resume (.): its config.json names model=theirs:model" in text
    assert str(run / "theirs.py") in text and "trust_run_dir=True" in text
    with pytest.raises(ValueError, match="names model=theirs:model"):
        file_config(run / "best.keras", {})


def test_a_package_a_folder_and_one_further_in_are_refused_too(run, monkeypatch):
    (run / "theirs.py").unlink()
    (run / "theirs").mkdir()  # without __init__.py, as Python takes it
    with pytest.raises(ValueError, match="names model=theirs:model"):
        continued_config(".", {})
    (run / "inner" / "theirs").mkdir(parents=True)
    monkeypatch.chdir(run / "inner")
    with pytest.raises(ValueError, match="names model=theirs:model"):
        continued_config("..", {})


@pytest.mark.parametrize("given", [{"trust_run_dir": True}, {"model": "theirs:model"}])
def test_it_is_imported_where_the_user_asks_for_it(given, run):
    assert continued_config(".", given).model == "theirs:model"
    assert file_config(run / "best.keras", given).model == "theirs:model"


def test_it_is_imported_from_the_users_own_pythonpath(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(run))
    monkeypatch.syspath_prepend(str(run))
    assert continued_config(".", {}).model == "theirs:model"


def test_a_module_of_the_directory_that_one_works_in_is_ones_own(run, monkeypatch):
    (run.parent / "theirs.py").write_text("")
    monkeypatch.chdir(run.parent)
    assert continued_config("run", {}).model == "theirs:model"


def test_no_config_asks_for_trust_itself(run):
    (run / "config.json").write_text(dataclasses.replace(NAMED, trust_run_dir=True).to_json())
    with pytest.raises(ValueError, match="names model=theirs:model"):
        continued_config(".", {})


def test_built_in_names_and_paths_are_no_modules(run):
    config = TrainConfig(model="cnn", data_dir="theirs:data", init_from="theirs:x.keras")
    (run / "config.json").write_text(config.to_json())
    assert continued_config(".", {}).model == "cnn"
