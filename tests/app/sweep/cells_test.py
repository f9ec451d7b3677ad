"""A sweep's cells: what the lists span, what is refused, and the flags for train.py."""

import pytest

from towers.app.config import TrainConfig
from towers.app.sweep.cells import Cell, Machine, cell_name, check_cells, make_cells, train_flags


def test_the_cells_are_all_combinations_batches_before_gpu_counts():
    assert make_cells(["cnn"], [], ["64", "128"], ["1", "2"]) == [
        Cell("cnn", None, 64, 1),
        Cell("cnn", None, 64, 2),
        Cell("cnn", None, 128, 1),
        Cell("cnn", None, 128, 2),
    ]


def test_models_and_dropouts_multiply_the_cells():
    cells = make_cells(["cnn", "mlp"], ["0", "0.25"], ["64"], ["1"])
    assert [cell.label for cell in cells] == [
        "cnn dropout=0", "cnn dropout=0.25", "mlp dropout=0", "mlp dropout=0.25",
    ]


def test_without_dropouts_the_label_is_the_model():
    assert Cell("cnn", None, 64, 1).label == "cnn"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_sizes": []}, "`batch_sizes` is empty; give a list such as batch_sizes=64,128"),
        ({"gpu_counts": ["1", "two"]}, r"gpu_counts \(1,two\): 'two' is not a whole number"),
        ({"gpu_counts": ["1.5"]}, "'1.5' is not a whole number"),
        ({"batch_sizes": ["64", "064"]}, r"batch_sizes \(64,064\) names 64 twice"),
        ({"models": ["cnn", ""]}, r"model \(cnn,\): '' is not a name"),
        ({"dropouts": ["0", "half"]}, r"dropout \(0,half\): 'half' is not a number"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused_by_its_name(change, message):
    lists = {"models": ["cnn"], "dropouts": [], "batch_sizes": ["64"], "gpu_counts": ["1"]}
    with pytest.raises(ValueError, match=message):
        make_cells(**{**lists, **change})


@pytest.mark.parametrize(
    ("cell", "shared", "message"),
    [
        (Cell("cnn", None, 0, 1), {}, r"batch_sizes \(0\) must be at least 1 each"),
        (Cell("cnn", None, 64, -2), {}, r"gpu_counts \(-2\) must be at least 1 each"),
        (Cell("cnn", 1.0, 64, 1), {}, r"dropout \(1.0\) must be a number from 0 to below 1"),
        (Cell("cnn", None, 64, 1), {"epochs": 0}, r"epochs \(0\) must be at least 1"),
        (Cell("cnn", None, 64, 4), {"num_towers": 2}, r"num_towers \(2\) is below the largest"),
    ],
)
def test_a_cell_that_no_run_could_have_is_refused(cell, shared, message):
    with pytest.raises(ValueError, match=message):
        check_cells([Cell("cnn", None, 8, 1), cell], TrainConfig(**shared))


def test_the_flags_of_a_cell_are_what_differs_from_train_pys_defaults():
    shared = TrainConfig(dataset="synthetic", max_steps=5, learning_rate=1e-5)
    flags = train_flags(Cell("cnn", 0.25, 64, 2).config(shared))
    assert sorted(flags) == [
        "--batch_size=64", "--dataset=synthetic", "--dropout=0.25", "--learning_rate=1e-05",
        "--max_steps=5", "--num_gpus=2",
    ]


def test_a_cells_directory_has_a_name_that_is_safe_for_files():
    label = Cell("my.models:build", 0.25, 128, 2).label
    assert cell_name(label, 128, 2) == "my.models_build_dropout_0.25-batch128-gpus2"


def test_gpus_are_called_by_their_name_and_cpu_devices_by_their_cores():
    assert str(Machine("NVIDIA H100", 16)) == "NVIDIA H100"
    assert str(Machine(None, 2)) == "logical CPU devices on 2 cores"
    assert str(Machine(None, 1)) == "logical CPU devices on 1 core"


def test_devices_are_counted_in_the_right_number():
    assert [Machine("NVIDIA H100", 16).devices(n) for n in (1, 2)] == ["1 GPU", "2 GPUs"]
    assert [Machine(None, 2).devices(n) for n in (1, 8)] == ["1 device", "8 devices"]
