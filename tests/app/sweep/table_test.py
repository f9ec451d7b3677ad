"""sweep.csv: its columns, speed-up and efficiency by hand, and the way back from the file."""

import math

import pytest

from tests.results import classifier_result
from towers.app.sweep.cells import Cell
from towers.app.sweep.table import (
    Row,
    empty_row,
    filled_row,
    mean_speed,
    read_table,
    with_speedups,
    write_table,
)

COLUMNS = (
    "model,batch_size,per_tower_batch,num_gpus,num_towers,epochs,accuracy,val_accuracy,seconds,"
    "examples_per_second,speedup,efficiency,host_memory_mb,device_memory_mb,error"
)


def row(batch_size, num_gpus, speed, model="cnn"):
    """A row of that examples_per_second; None for a cell that failed."""
    cell = empty_row(Cell(model, None, batch_size, num_gpus), None)
    if speed is None:
        return cell._replace(error="it broke.")
    return cell._replace(examples_per_second=float(speed))


def of_speeds(speeds):
    """Rows with speed-ups, from {(global batch, GPUs): examples per second}."""
    return with_speedups([row(*cell, speed) for cell, speed in speeds.items()])


def test_the_per_tower_batch_is_the_largest_shard():
    cell = Cell("cnn", None, 100, 3)
    assert empty_row(cell, None)[:5] == ("cnn", 100, 34, 3, 3)
    assert empty_row(cell, 8)[:5] == ("cnn", 100, 13, 3, 8)


def test_a_row_has_the_last_epochs_accuracies_and_all_epochs_seconds():
    epochs = [
        classifier_result(1, 2.0, 0.1, 1.5, 0.2, 10.0, 100.0),
        classifier_result(2, 1.0, 0.3, 0.9, 0.4, 6.0, 300.0),
    ]
    done = filled_row(row(64, 1, None)._replace(error=""), epochs, 812.0, None)
    assert (done.epochs, done.accuracy, done.val_accuracy, done.seconds) == (2, 0.3, 0.4, 16.0)
    assert (done.host_memory_mb, done.device_memory_mb, done.error) == (812.0, None, "")


def test_the_speed_of_equal_epochs_is_all_examples_over_all_seconds():
    # 300 examples in 3 s and 300 in 1 s are 600 in 4 s.
    epochs = [classifier_result(e, examples_per_second=speed) for e, speed in ((1, 100), (2, 300))]
    assert mean_speed(epochs) == pytest.approx(150.0)


def test_speedup_is_against_one_gpu_at_the_same_model_and_batch():
    rows = with_speedups([
        row(64, 4, 300), row(64, 1, 100), row(128, 4, 800), row(128, 1, 200),
        row(64, 4, 50, "mlp"), row(64, 1, 500, "mlp"),
    ])
    assert [(r.model, r.batch_size, r.num_gpus, r.speedup, r.efficiency) for r in rows] == [
        ("cnn", 64, 1, 1, 1), ("cnn", 64, 4, 3, 0.75),
        ("cnn", 128, 1, 1, 1), ("cnn", 128, 4, 4, 1),
        ("mlp", 64, 1, 1, 1), ("mlp", 64, 4, 0.1, 0.025),
    ]


@pytest.mark.parametrize("alone", [[], [row(64, 1, None)]])
def test_without_one_gpus_cell_there_is_no_speedup(alone):
    (two,) = [r for r in with_speedups([row(64, 2, 300), *alone]) if r.num_gpus == 2]
    assert (two.speedup, two.efficiency) == (None, None)


def test_the_table_comes_back_from_its_file(tmp_path):
    rows = of_speeds({(64, 1): 100, (64, 2): 150, (128, 1): None})
    rows[0] = rows[0]._replace(epochs=3, val_accuracy=math.inf, device_memory_mb=12.5)
    rows[2] = rows[2]._replace(error='a "quoted", listed error')
    write_table(tmp_path / "sweep.csv", rows)
    assert (tmp_path / "sweep.csv").read_text().splitlines()[0] == COLUMNS
    assert read_table(tmp_path / "sweep.csv") == rows


def test_what_is_not_known_is_an_empty_field(tmp_path):
    write_table(tmp_path / "sweep.csv", [row(100, 3, None)])
    text = (tmp_path / "sweep.csv").read_text()
    assert text.splitlines()[1] == "cnn,100,34,3,3,,,,,,,,,,it broke."


def test_no_file_is_no_rows(tmp_path):
    assert read_table(tmp_path / "sweep.csv") == []


@pytest.mark.parametrize(
    "text", ["", "a,b\n", COLUMNS + "\n1,2\n", COLUMNS + "\ncnn,x,1,1,1,,,,,,,,,,\n"]
)
def test_another_file_is_refused(text, tmp_path):
    (tmp_path / "sweep.csv").write_text(text)
    with pytest.raises(ValueError, match=r"sweep.csv is not what a sweep wrote \(.*\); name an"):
        read_table(tmp_path / "sweep.csv")


def test_rows_are_the_contracts_columns():
    assert ",".join(Row._fields) == COLUMNS
