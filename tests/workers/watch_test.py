"""Real processes and real signals: how those end that wait for a worker that will not come."""

import re
import signal
import time

import pytest

from tests import real_workers as started
from towers.workers.cluster import LOST_WORKER

WORKER = ("-m", "tests.workers.worker")


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


def hang(what, **environment):
    """(worker 1, stderr of worker 0) where worker 1 hangs; it is stopped in "steps"."""
    processes = begin(2, what, **environment)
    if what == "steps":
        processes[1].send_signal(signal.SIGSTOP)
    ((code, _, errors),) = started.finish(processes[:1], timeout=60)
    assert code == LOST_WORKER
    return processes[1], errors


@pytest.mark.matrix
def test_a_stopped_worker_is_named_after_the_timeout():
    process, errors = hang("steps", TIMEOUT="4")
    process.kill()
    assert "error: worker 1 (127.0.0.1:" in errors and "did not answer for" in errors


def test_a_worker_that_hangs_between_steps_is_named_and_says_where():
    process, errors = hang("hang_between_steps")
    assert re.search(
        r"error: worker 1 \(127.0.0.1:\d+\) did not come to the end of a step for [12] seconds, "
        r"and the log there says where it hangs. Start the run again with resume=DIR", errors
    )
    ((code, _, errors),) = started.finish([process], timeout=60)
    assert code == -signal.SIGABRT
    assert re.search(
        r"error: the others wait for this worker, which has hung for [12] seconds, in "
        r"sleep_for_long \(.*worker.py, line \d+\). Start the run again", errors
    )


@pytest.mark.matrix
def test_a_worker_that_hangs_wholly_ends_the_others_after_ten_times_the_timeout():
    process, errors = hang("hang_wholly")
    process.kill()
    assert re.search(  # a machine that is busy may not answer either
        "the workers answer, but not all of them came to the end of a step within|did not answer",
        errors,
    )


@pytest.mark.matrix
def test_nobody_ends_while_nobody_waits_as_long_or_a_worker_writes_a_file():
    ended = started.run_all(2, *WORKER, "pause")
    assert [(code, said) for code, said, _ in ended] == [(0, '"came"\n')] * 2, ended


@pytest.mark.matrix
@pytest.mark.parametrize("present", [0, 1])
def test_a_worker_that_never_starts_is_named_after_the_timeout(present):
    hosts = started.addresses(2)
    process = started.start(hosts, present, *WORKER, "steps", TIMEOUT="4")
    ((code, _, errors),) = started.finish([process], timeout=60)
    assert code == LOST_WORKER, errors
    assert f"worker {1 - present} ({hosts[1 - present]})" in errors
