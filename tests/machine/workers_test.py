"""Real processes and real signals: what workers tell each other, and how they end."""

import json
import re
import signal
import socket
import time

import pytest

from tests import workers as started
from towers.machine import workers
from towers.machine.cluster import ALONE, LOST_WORKER

WORKER = ("-m", "tests.machine.worker")


def test_workers_tell_each_other_flags_and_bytes():
    ended = started.run_all(2, *WORKER, "between_steps")
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2]
    for _, said, _ in ended:
        assert json.loads(said) == {
            "most": [[0, 7], [1, 3]],
            "everyones": [[0], [255, 1]],
            "chiefs": list(range(9)),
            "answers": True,
            "is_gone": False,
        }


def test_who_is_alone_hears_itself():
    told = workers.Workers(ALONE)
    assert told.most(3, 0) == (3, 0)
    told.check_same({"seed": 1})
    told.part()
    assert (told.everyones(b"x"), told.chiefs(b"y")) == ([b"x"], b"y")


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
    assert time.monotonic() - began_at < 0.8 * workers.DEFAULT_TIMEOUT


def begin(count, what, **environment):
    """Workers, all of which have begun to meet."""
    processes = started.start_all(count, *WORKER, what, **environment)
    for process in processes:
        assert process.first_line() == '"begun"'
    return processes


@pytest.mark.parametrize("lost", [0, 2])
def test_a_killed_worker_is_named_by_all_others_at_once(lost):
    processes = begin(3, "steps")
    killed_at = time.monotonic()
    processes[lost].send_signal(signal.SIGKILL)
    others = [process for i, process in enumerate(processes) if i != lost]
    for code, _, errors in started.finish(others, timeout=60):
        assert code == LOST_WORKER
        assert f"error: worker {lost} (127.0.0.1:" in errors
        assert "was lost in the end of a step. Start the run again with resume=DIR" in errors
    assert time.monotonic() - killed_at < 10


def test_a_stopped_worker_is_named_after_the_timeout():
    processes = begin(2, "steps", TIMEOUT="4")
    processes[1].send_signal(signal.SIGSTOP)
    ((code, _, errors),) = started.finish(processes[:1], timeout=60)
    processes[1].kill()
    assert code == LOST_WORKER
    assert "error: worker 1 (127.0.0.1:" in errors
    assert "did not answer for" in errors


def test_a_worker_that_hangs_ends_the_others_after_the_timeout():
    processes = begin(2, "hang", LATER="1")
    ((code, _, errors),) = started.finish(processes[:1], timeout=60)
    processes[1].kill()
    assert code == LOST_WORKER
    assert "the workers answer, but not all of them came to the end of a step within" in errors


@pytest.mark.parametrize("present", [0, 1])
def test_a_worker_that_never_starts_is_named_after_the_timeout(present):
    hosts = started.addresses(2)
    process = started.start(hosts, present, *WORKER, "steps", TIMEOUT="4")
    ((code, _, errors),) = started.finish([process], timeout=60)
    assert code == LOST_WORKER, errors
    assert f"worker {1 - present} ({hosts[1 - present]})" in errors


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
