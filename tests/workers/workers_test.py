"""Real processes: what workers tell each other."""

import json
import re
import socket
import time

import pytest

from tests import real_workers as started
from towers.workers import watch, workers
from towers.workers.cluster import ALONE

WORKER = ("-m", "tests.workers.worker")


def test_workers_tell_each_other_flags_and_bytes():
    ended = started.run_all(2, *WORKER, "between_steps")
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2]
    for _, said, _ in ended:
        assert json.loads(said) == {
            "all_reduce_max": [[0, 7], [1, 3]],
            "all_gather": [[0], [255, 1]],
            "broadcast": list(range(9)),
            "answers": True,
        }


def test_who_is_alone_hears_itself():
    told = workers.Workers(ALONE)
    assert told.all_reduce_max(3, 0) == (3, 0)
    told.check_same({"seed": 1})
    told.barrier()
    assert (told.all_gather(b"x"), told.broadcast(b"y")) == ([b"x"], b"y")


def test_what_differs_from_the_chief_is_told_everywhere():
    for code, said, errors in started.run_all(2, *WORKER, "differ"):
        assert code == 0, errors
        assert re.fullmatch(
            r"worker 1 \(127.0.0.1:\d+\) differs from the chief in index \(1, the chief's is 0\), "
            r"a \(1, the chief's is 0\), b \(1, the chief's is 0\) and 1 more. All workers must be "
            r"given the same.", json.loads(said)
        )


def test_who_parts_waits_for_the_others():
    (code, came, _), (other, parted, _) = started.run_all(2, *WORKER, "part")
    assert (code, other) == (0, 0)
    assert float(parted) > float(came)


def test_who_has_met_the_others_once_may_end_and_holds_nobody():
    began_at = time.monotonic()
    ended = started.run_all(2, *WORKER, "part_once")
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2]
    assert time.monotonic() - began_at < 0.8 * watch.DEFAULT_TIMEOUT


@pytest.mark.matrix
def test_a_worker_may_come_late():
    hosts = started.addresses(2)
    first = started.start(hosts, 1, *WORKER, "between_steps", TIMEOUT="60")
    time.sleep(8)
    second = started.start(hosts, 0, *WORKER, "between_steps", TIMEOUT="60")
    assert [code for code, _, _ in started.finish([first, second], 60)] == [0, 0]


def test_a_taken_port_is_an_error_before_tensorflow_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        hosts = [f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:1"]
        process = started.start(hosts, 0, *WORKER, "steps")
        ((code, _, errors),) = started.finish([process], timeout=60)
    assert code == 1
    assert f"this worker's address is {hosts[0]}, and port" in errors
    assert "Address already in use. Is another worker of this index running?" in errors
