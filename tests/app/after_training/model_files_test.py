"""The file of a trained model, and what is known of the run that it lies beside."""

import pytest

from towers.app.after_training.model_files import class_names, file_config, find_file
from towers.resume.run_dir import write_class_names
from towers.app.config import TrainConfig


@pytest.fixture(name="run")
def _run(tmp_path):
    config = TrainConfig(
        dataset="npz", data_dir="x.npz", batch_size=32, num_gpus=8, num_towers=8, cpu_threads=2,
        device="gpu", export="there", init_from="first.keras",
    )
    (tmp_path / "config.json").write_text(config.to_json())
    (tmp_path / "final.keras").touch()
    return tmp_path


def test_a_directory_stands_for_its_best_model_or_else_its_final_one(run):
    assert find_file(str(run), "predict") == run / "final.keras"
    (run / "best.keras").touch()
    assert find_file(str(run), "predict") == run / "best.keras"
    assert find_file(str(run / "final.keras"), "predict") == run / "final.keras"


def test_what_is_neither_is_refused(run):
    with pytest.raises(ValueError, match=r"^predict \(.*missing\) is neither a .keras file nor"):
        find_file(str(run / "missing"), "predict")


def test_the_runs_data_and_batch_are_brought_unless_others_are_given(run):
    config = file_config(run / "final.keras", {"num_gpus": 2})
    assert config == TrainConfig(dataset="npz", data_dir="x.npz", batch_size=32, num_gpus=2)
    config = file_config(run / "final.keras", {"dataset": "mnist", "batch_size_per_gpu": 4})
    assert config == TrainConfig(dataset="mnist", batch_size_per_gpu=4)
    alone = file_config(run / "elsewhere" / "m.keras", {"batch_size": 4})
    assert alone == TrainConfig(batch_size=4)


def test_the_names_of_the_runs_classes_are_found_beside_the_file(run):
    assert class_names(run / "final.keras") == []
    write_class_names(run, ["cat", "\udcff", "dog"])
    assert class_names(run / "final.keras") == ["cat", "\udcff", "dog"]
    for damaged in ("{}", "[1]", '["cat"', "[" * 100_000):
        (run / "classes.json").write_text(damaged)
        with pytest.raises(ValueError, match="classes.json is no list of the classes' names; rem"):
            class_names(run / "final.keras")


def test_the_size_of_a_runs_images_is_that_of_other_folders_too_and_of_no_other_data(tmp_path):
    of_run = TrainConfig(dataset="image_folder", data_dir="mine", image_size="4x5x3")
    (tmp_path / "config.json").write_text(of_run.to_json())
    other = {"dataset": "image_folder", "data_dir": "other"}
    assert file_config(tmp_path / "m.keras", other) == TrainConfig(**other, image_size="4x5x3")
    mnist = {"dataset": "mnist"}
    assert file_config(tmp_path / "m.keras", mnist) == TrainConfig(**mnist)
