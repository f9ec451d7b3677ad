"""results.csv: rows of a run, also of one that goes on, and of a disk that is full."""

import pytest

from tests.results import COLUMNS, classifier_result
from towers.checkpointing import run_dir
from towers.checkpointing.train_state import TrainState
from towers.training.results_file import ResultsFile


def result(epoch):
    return classifier_result(epoch, 0.5, 0.25, 0.5, 0.25, 12.0, 3912.5)


def epochs(path):
    return [line.split(",")[0] for line in (path / "results.csv").read_text().splitlines()]


def test_each_epoch_adds_a_row(tmp_path):
    file = ResultsFile(tmp_path, TrainState(), COLUMNS, pytest.fail)
    file.begin()
    assert not (tmp_path / "results.csv").exists()
    for epoch in (1, 2):
        file.end_epoch(result(epoch), {})
    assert epochs(tmp_path) == ["epoch", "1", "2"]


def test_rows_after_the_checkpoint_are_dropped(tmp_path):
    run_dir.write_results(tmp_path / "results.csv", [result(1), result(2), result(3)])
    train_state = TrainState(results=[list(map(float, result(1).row))])
    file = ResultsFile(tmp_path, train_state, COLUMNS, pytest.fail)
    file.begin()
    assert epochs(tmp_path) == ["epoch", "1"]
    file.end_epoch(result(2), {})
    assert epochs(tmp_path) == ["epoch", "1", "2"]


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path):
    warnings = []
    train_state = TrainState(results=[result(1).row])
    file = ResultsFile(tmp_path / "nowhere", train_state, COLUMNS, warnings.append)
    file.begin()
    file.end_epoch(result(2), {})
    assert warnings == 2 * [
        f"{tmp_path}/nowhere/results.csv cannot be written (No such file or directory); training "
        "goes on."
    ]
