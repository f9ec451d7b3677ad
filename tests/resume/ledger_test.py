"""The file of a ledger: cut back to the position of a training, and no reason to end one."""

import keras
import numpy as np
import pytest

from towers.resume.ledger import LedgerFile, read_ledger


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])


def add(path, model, steps, every=2, warn=pytest.fail):
    ledger = LedgerFile(path, model, every, warn)
    for step in steps:
        ledger.add(1, step, step - 1, lambda step=step: np.full((4, 3), step))


@pytest.mark.parametrize(
    "position, torn", [(0, ""), (3, "1,1"), (4, "1,10,abc\n"), (8, "x\n1,2,a,b,c\n")]
)
def test_a_resumed_ledger_has_no_gap_and_no_line_twice(tmp_path, model, position, torn):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    add(whole, model, range(1, 13))
    add(resumed, model, range(1, 9))
    with resumed.open("a") as file:
        file.write(torn)
    add(resumed, model, range(position + 1, 13))
    assert resumed.read_text() == whole.read_text()
    assert [line.step for line in read_ledger(whole)] == [2, 4, 6, 8, 10, 12]


def test_several_steps_at_a_time_give_one_line(tmp_path, model):
    ledger = LedgerFile(tmp_path / "a", model, 4, pytest.fail)
    for step in (3, 6, 12, 15):
        ledger.add(1, step, step - 3, lambda: None)
    assert [(line.step, line.batch) for line in read_ledger(tmp_path / "a")] == [(6, ""), (12, "")]


def test_a_ledger_that_cannot_be_written_is_one_warning(tmp_path, model):
    lines = []
    (tmp_path / "link").symlink_to(tmp_path / "other")
    add(tmp_path / "link", model, range(1, 9), warn=lines.append)
    assert len(lines) == 1 and "training continues" in lines[0]
    assert not (tmp_path / "other").exists()
