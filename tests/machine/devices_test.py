"""What there is to run on, and the errors that say what to do instead."""

import pytest

from towers.machine import devices
from towers.machine.devices import CPU, GPU, REHEARSAL


def test_tower_devices_are_the_first_of_those_present():
    assert devices.tower_devices(3, "cpu") == ["/cpu:0", "/cpu:1", "/cpu:2"]
    assert len(devices.tower_devices(None, "auto")) == 8


@pytest.mark.parametrize("arguments, message", [
    ((0, "cpu"), r"num_gpus \(0\) must be at least 1"),
    ((-1, "cpu"), r"num_gpus \(-1\) must be at least 1"),
    ((9, "cpu"), r"num_gpus \(9\) is more than .* 8 \(/cpu:0, .*towers.logical_cpus\(9\)"),
    ((1, "gpu"), r"no GPU on this machine. Use device=auto"),
    ((1, "tpu"), r"device \('tpu'\) must be one of auto, gpu, cpu"),
])
def test_a_request_that_cannot_be_met_says_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        devices.tower_devices(*arguments)


def test_more_gpus_than_present_names_both_lists_and_the_ways_out():
    error = devices.too_many("num_gpus", 8, range(8), ["/gpu:0", "/gpu:1"])
    for part in ("num_gpus (8)", "2 (/gpu:0, /gpu:1)", "num_gpus=2 with num_towers=8"):
        assert part in str(error)


@pytest.mark.parametrize("names, message", [
    (["/gpu:0"], "'/gpu:0' is not on this machine. It has: /cpu:0, "),
    (["/cpu:8"], "'/cpu:8' is not on this machine"),
    (["/cpu:1", "/device:CPU:1"], "names a device twice"),
    ([], "devices is empty"),
])
def test_absent_and_doubled_devices_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        devices.check_devices(names)


@pytest.mark.parametrize("num_towers, num_devices, expected", [
    (8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
    (8, 3, [0, 0, 0, 1, 1, 1, 2, 2]),
    (5, 2, [0, 0, 0, 1, 1]),
    (3, 8, [0, 2, 5]),
])
def test_towers_take_contiguous_ranges_of_devices(num_towers, num_devices, expected):
    assert devices.place_towers(num_towers, list(range(num_devices))) == expected


@pytest.mark.parametrize("num_towers, num_cores, threads, of_compiled", [
    (2, 2, 1, 2), (8, 2, 1, 2), (1, 8, 8, 8), (3, 8, 2, 3), (4, 8, 2, 4), (3, 16, 5, 5),
])
def test_threads_follow_from_towers_and_cores(num_towers, num_cores, threads, of_compiled):
    """Compiled towers have a thread each as far as cores go round."""
    for compiled, expected in ((False, threads), (True, of_compiled)):
        found = devices.cpu_threads(num_towers, num_cores=num_cores, compiled=compiled)
        assert found == (expected, num_cores)


@pytest.mark.parametrize(("names", "value", "expected"), [
    (["/cpu:0", "/cpu:1"], None, CPU), (["/cpu:0"], "0", CPU), (["/cpu:0"], "", CPU),
    (["/gpu:0"], None, GPU), (["/cpu:0", "/gpu:1"], None, GPU), (["/cpu:0"], "1", GPU),
])
def test_gpus_and_those_that_rehearse_them_have_the_policy_of_gpus(
    names, value, expected, monkeypatch
):
    monkeypatch.delenv(REHEARSAL, raising=False)
    if value is not None:
        monkeypatch.setenv(REHEARSAL, value)
    assert devices.policy_of(names) is expected


@pytest.mark.parametrize("name", [
    "/cpu:3", "CPU:3", "/device:CPU:3", "/job:worker/replica:0/task:1/device:CPU:3"
])
def test_a_device_has_one_short_name(name):
    assert devices.short_name(name) == "/cpu:3"
