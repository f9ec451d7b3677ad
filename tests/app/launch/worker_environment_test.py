"""Every worker's GPUs: of a list that there is already, of the machine's, or too few."""

import json
import socket

import pytest

from towers.app.launch import worker_environment
from towers.app.launch.worker_environment import checked_hosts, free_addresses, shares, tf_config


@pytest.mark.parametrize("workers, each, visible, present, expected", [
    (2, 2, None, 4, ["0,1", "2,3"]),
    (2, 1, None, 8, ["0", "1"]),
    (3, 2, None, None, ["0,1", "2,3", "4,5"]),  # nobody knows how many there are
    (2, 2, "7,5,3,1,0", 0, ["7,5", "3,1"]),
    (2, 1, " GPU-8f2a , MIG-11ab ", None, ["GPU-8f2a", "MIG-11ab"]),
])
def test_each_worker_gets_the_next_ones(workers, each, visible, present, expected):
    assert shares(workers, each, visible, present) == expected


@pytest.mark.parametrize("workers, each, visible, present, message", [
    (4, 2, None, 4, "--workers (4) with --gpus_per_worker (2) need 8 GPUs; this machine has 4. "
     "Use --gpus_per_worker=1."),
    (4, 2, None, 3, "this machine has 3. Use --workers=1."),
    (2, 1, None, 0, "this machine has 0. Leave --gpus_per_worker out to run on CPUs."),
    (2, 1, "3", 8, "CUDA_VISIBLE_DEVICES='3' names 1. Use --workers=1."),
    (2, 1, "", 8, "CUDA_VISIBLE_DEVICES='' names 0. Leave"),
    (2, 1, "0,-1,1", 8, "CUDA_VISIBLE_DEVICES='0,-1,1' names 1. Use --workers=1."),
])
def test_too_few_are_refused_with_what_would_work(workers, each, visible, present, message):
    with pytest.raises(ValueError) as error:
        shares(workers, each, visible, present)
    assert message in str(error.value)


def test_tf_config_is_what_tensorflow_reads(monkeypatch):
    import tensorflow as tf

    monkeypatch.setenv("TF_CONFIG", tf_config(["10.0.0.1:2222", "10.0.0.2:2223"], 1))
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:2222", "10.0.0.2:2223"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def test_it_is_one_line_of_json():
    text = tf_config(["a:1"], 0)
    assert "\n" not in text and "'" not in text
    assert json.loads(text)["task"] == {"type": "worker", "index": 0}


def test_addresses_are_this_machines_own_different_and_free():
    addresses = free_addresses(8)
    assert len(set(addresses)) == 8
    for address in addresses:
        host, port = address.split(":")
        assert host == "127.0.0.1"
        with socket.socket() as trial:
            trial.bind((host, int(port)))


def test_ports_lie_where_no_connection_takes_one(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_environment, "CONNECTIONS", tmp_path / "range")
    (tmp_path / "range").write_text("20004\t60999\n")
    ports = {int(address.split(":")[1]) for address in free_addresses(1000)}
    assert min(ports) >= 10_000 and max(ports) < 20_004


def test_a_system_that_does_not_tell_its_range_has_the_usual_one(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_environment, "CONNECTIONS", tmp_path / "missing")
    assert all(10_000 <= int(a.split(":")[1]) < 32_768 for a in free_addresses(1000))


def test_a_port_that_is_taken_is_left_out(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        (free,) = free_addresses(1)
        other = int(free.split(":")[1])
        monkeypatch.setattr(worker_environment, "candidate_ports", lambda: iter([port, other]))
        assert free_addresses(1) == [free]
        with pytest.raises(ValueError, match="2 workers need as many free ports"):
            free_addresses(2)


@pytest.mark.parametrize("hosts", [["a:2222", " b:2222 "], ["[fe80::1%eth0]:1", "a-b.c_d:65535"]])
def test_addresses_may_be_names_numbers_or_ipv6(hosts):
    assert checked_hosts(hosts) == [host.strip() for host in hosts]


@pytest.mark.parametrize("hosts, message", [
    ([], "--hosts is empty; name each machine and a port, such as --hosts=10.0.0.1:2222"),
    (["a:1", "b"], "--hosts: 'b' is not host:port with a port from 1 to 65,535; write it as in"),
    (["a:"], "'a:' is not"),
    ([":2222"], "':2222' is not"),
    (["a:0"], "'a:0' is not"),
    (["a:65536"], "'a:65536' is not"),
    (["a:-1"], "'a:-1' is not"),
    (["::1:2222"], "'::1:2222' is not"),
    (["http://n:1"], "'http://n:1' is not"),
    (["me@a:1"], "'me@a:1' is not"),
    (["a/b:1"], "'a/b:1' is not"),
    (["a:1", "b:1", "a:1"], "--hosts names a:1 twice; each worker needs an address of its own"),
])
def test_other_addresses_are_refused(hosts, message):
    with pytest.raises(ValueError) as error:
        checked_hosts(hosts)
    assert message in str(error.value)
