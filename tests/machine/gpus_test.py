"""The `gpus` argument: a count or a list of indices, and what is refused saying what would work."""

import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.machine.fake_gpus import FakeGpus
from towers.app.config import TrainConfig
from towers.machine import gpus
from towers.app.training.build import find_devices

# The machine of these tests has 8 logical CPU devices.
pytestmark = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="this machine has a GPU"
)


@pytest.mark.parametrize(
    "asked, expected",
    [
        (None, [f"/cpu:{i}" for i in range(8)]),
        ((5, 1), ["/cpu:5", "/cpu:1"]),
        (range(2), ["/cpu:0", "/cpu:1"]),
        (np.int64(2), ["/cpu:0", "/cpu:1"]),
        (np.array([3, 1]), ["/cpu:3", "/cpu:1"]),
    ],
)
def test_gpus_is_a_count_or_a_list_of_indices(asked, expected):
    """On a machine without GPUs: logical CPU devices."""
    assert gpus.gpu_devices(asked) == expected


@pytest.mark.parametrize(
    "asked",
    [
        0,
        2.0,
        "2",
        [],
        [0, 0],
        [0, -1],
        [True, 0],
        [[0], [1]],
    ],
)
def test_other_gpus_are_errors_that_say_what_would_work(asked):
    with pytest.raises(ValueError) as error:
        gpus.gpu_devices(asked)
    assert repr(asked) in str(error.value)
    assert "gpus=2 or gpus=[0, 1]" in str(error.value)
    assert "This machine has 0 GPUs" in str(error.value)


@pytest.mark.parametrize(
    "asked, remedy",
    [
        (9, "gpus=8, or gpus=8 with num_towers=9"),
        ([0, 8], "gpus=8 with num_towers=2"),
    ],
)
def test_more_than_the_logical_cpus_names_both_and_the_ways_out(asked, remedy):
    with pytest.raises(ValueError) as error:
        gpus.gpu_devices(asked)
    for part in (repr(asked), ": 8 (/cpu:0, ", "/cpu:7", "towers.logical_cpus(9)", remedy):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "value, expected",
    [
        (-1, -1),
        (np.uint8(0), 0),
        (True, None),
        (np.bool_(True), None),
        (3.0, None),
        ([3], None),
    ],
)
def test_integers_are_pythons_and_numpys_and_no_truth_values(value, expected):
    found = gpus.as_integer(value)
    assert found == expected and type(found) in (int, type(None))


@pytest.fixture(autouse=True)
def _nothing_hidden():
    """What one test hides, the next one's machine has again."""
    yield
    gpus.shown.clear()


@pytest.mark.parametrize(
    "asked, visible, names",
    [
        (2, ["A", "B"], ["/gpu:0", "/gpu:1"]),
        ([3, 1], ["B", "D"], ["/gpu:1", "/gpu:0"]),
    ],
)
def test_gpus_that_are_not_asked_for_are_hidden_before_tensorflow_starts(
    asked, visible, names, monkeypatch
):
    machine = FakeGpus(4, monkeypatch)
    assert gpus.gpu_devices(asked) == names
    assert machine.visible == visible
    assert gpus.gpu_devices(asked) == names  # again: the same GPUs


def test_a_gpu_that_is_hidden_is_not_there_for_a_later_call(monkeypatch):
    FakeGpus(4, monkeypatch)
    gpus.gpu_devices([0, 2])
    assert gpus.gpu_devices([2]) == ["/gpu:1"]
    with pytest.raises(ValueError, match=r"\(\[3\]\): an earlier call has hidden all but \[0, 2\]"):
        gpus.gpu_devices([3])


def test_where_tensorflow_has_started_one_line_says_whose_memory_it_keeps(monkeypatch):
    machine = FakeGpus(4, monkeypatch, has_started=True)
    with pytest.warns(UserWarning, match="keeps the memory of /gpu:1, /gpu:3, .*DEVICES=0,2 "):
        assert gpus.gpu_devices([2, 0]) == ["/gpu:2", "/gpu:0"]
    assert len(machine.visible) == 4


def test_divided_gpus_and_gpus_that_are_not_there_hide_nothing(monkeypatch):
    machine = FakeGpus(4, monkeypatch)
    with pytest.raises(ValueError) as error:
        gpus.gpu_devices(5)
    for part in ("gpus (5)", ": 4 (/gpu:0, ", "gpus=4, or gpus=4 with num_towers=5"):
        assert part in str(error.value)
    towers.logical_gpus(5, memory_mib=1024)
    assert gpus.gpu_devices([4]) == ["/gpu:4"]
    assert len(machine.visible) == 4


def test_train_py_hides_the_gpus_that_it_does_not_use(monkeypatch):
    machine = FakeGpus(4, monkeypatch)
    assert find_devices(TrainConfig(num_gpus=1)) == ["/gpu:0"]
    assert machine.visible == ["A"]
