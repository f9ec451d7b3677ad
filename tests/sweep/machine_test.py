"""What a sweep's cells ran on, in words."""

from towers.sweep.machine import Machine


def test_gpus_are_called_by_their_name_and_cpu_devices_by_their_cores():
    assert str(Machine("NVIDIA H100", 16)) == "NVIDIA H100"
    assert str(Machine(None, 2)) == "logical CPU devices on 2 cores"
    assert str(Machine(None, 1)) == "logical CPU devices on 1 core"


def test_devices_are_counted_in_the_right_number():
    assert [Machine("NVIDIA H100", 16).devices(n) for n in (1, 2)] == ["1 GPU", "2 GPUs"]
    assert [Machine(None, 2).devices(n) for n in (1, 8)] == ["1 device", "8 devices"]
