"""What there is to run on, and the errors that say what to do instead."""

import pytest

from towers.machine import devices


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
    message = devices.too_many(8, "gpu", ["/gpu:0", "/gpu:1"])
    assert message == (
        "num_gpus (8) is more than this machine has: 2 (/gpu:0, /gpu:1). "
        "Use num_gpus=2, or num_gpus=2 num_towers=8."
    )


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


def test_threads_follow_from_towers_and_cores():
    assert devices.cpu_threads(2, num_cores=2) == (1, 2)
    assert devices.cpu_threads(8, num_cores=2) == (1, 2)
    assert devices.cpu_threads(1, num_cores=8) == (8, 8)
    assert devices.cpu_threads(3, num_cores=8) == (2, 8)


@pytest.mark.parametrize("num_towers, num_cores, threads", [
    (2, 2, 2), (8, 2, 2), (1, 8, 8), (4, 8, 4), (3, 16, 5),
])
def test_compiled_towers_have_a_thread_each_as_far_as_cores_go_round(
    num_towers, num_cores, threads
):
    found = devices.cpu_threads(num_towers, num_cores=num_cores, compiled=True)
    assert found == (threads, num_cores)


@pytest.mark.parametrize("name", [
    "/cpu:3", "CPU:3", "/device:CPU:3", "/job:worker/replica:0/task:1/device:CPU:3"
])
def test_a_device_has_one_short_name(name):
    assert devices.short_name(name) == "/cpu:3"
