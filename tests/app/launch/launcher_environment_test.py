"""Each worker's GPUs and addresses."""

import socket

import pytest

from towers.app.launch import launcher
from towers.app.launch.launcher import free_addresses, gpu_shares, lines_to_type
from towers.machine import nvidia


@pytest.fixture(name="shares")
def _shares(monkeypatch):
    """gpu_shares, given CUDA_VISIBLE_DEVICES and the number of GPUs; None where it is unknown."""
    def shares(workers, each, visible, present):
        monkeypatch.setattr(nvidia, "driver_gpus", lambda: present and [None] * present)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return gpu_shares(workers, each)

    return shares


@pytest.mark.parametrize("workers, each, visible, present, expected", [
    (2, 2, None, 4, ["0,1", "2,3"]),
    (3, 2, None, None, ["0,1", "2,3", "4,5"]),
    (2, 2, "7,5,3,1,0", 1, ["7,5", "3,1"]),
    (2, 1, " GPU-8f2a , MIG-11ab ", None, ["GPU-8f2a", "MIG-11ab"]),
])
def test_each_worker_gets_the_next_gpus(workers, each, visible, present, expected, shares):
    assert shares(workers, each, visible, present) == expected


@pytest.mark.parametrize("visible, present, message", [
    (None, 3, "--workers (2) with --gpus_per_worker (2) need 4 GPUs; this machine has 3. Use less"),
    ("", 8, "CUDA_VISIBLE_DEVICES='' names 0."),
    ("0,-1,1", 8, "CUDA_VISIBLE_DEVICES='0,-1,1' names 1."),
])
def test_too_few_gpus_are_an_error(visible, present, message, shares):
    with pytest.raises(ValueError) as error:
        shares(2, 2, visible, present)
    assert message in str(error.value)


@pytest.mark.parametrize("visible, is_warned", [(None, True), ("0,1", True), ("", False)])
def test_workers_that_share_gpus_are_warned_of(visible, is_warned, shares, monkeypatch, capsys):
    monkeypatch.setattr(nvidia, "driver_version", lambda: "550.1")
    assert shares(2, None, visible, 2) == [None, None]
    assert ("all 2 workers see the same GPUs" in capsys.readouterr().out) == is_warned


def test_addresses_are_this_machines_own_different_and_free(monkeypatch):
    addresses = free_addresses(8)
    assert len({*addresses}) == 8
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = [taken.getsockname()[1], int(addresses[0].rpartition(":")[2])]
        monkeypatch.setattr(launcher.random, "sample", lambda *_: ports)
        assert free_addresses(1) == addresses[:1]


@pytest.mark.parametrize("hosts", [
    ["a:1", "b"], ["a:"], [":2222"], ["a:0"], ["a:65536"], ["::1:2222"], ["http://n:1"], ["me@a:1"],
    ["a:1", "b:1", "a:1"],
])
def test_hosts_that_are_no_addresses_or_the_same_are_an_error(hosts):
    with pytest.raises(ValueError, match="--hosts .* must be different addresses, host:port"):
        list(lines_to_type(hosts, []))
