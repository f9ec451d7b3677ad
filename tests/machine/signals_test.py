"""Ctrl-C, SIGTERM and SIGHUP wait until a step is done, and then do what they did before."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from towers.machine.signals import deferred

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP], name="number")
def _number(request):
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


class Received(Exception):
    """What a handler of the caller's raises."""


def raise_received(number, frame):
    raise Received(number)


def test_a_signal_waits_for_the_check_and_is_then_received_as_before(number):
    signal.signal(number, raise_received)
    reached = []
    with pytest.raises(Received):
        with deferred() as pending:
            pending.obey(pending.number or 0)
            signal.raise_signal(number)
            reached.append("the end of the step")
            try:
                pending.obey(pending.number or 0)
            except Exception:
                pytest.fail("caught")
            reached.append("never")
    assert reached == ["the end of the step"]
    assert signal.getsignal(number) is raise_received


def test_an_error_inside_gives_the_handlers_back_and_stays_what_it_is(number):
    signal.signal(number, raise_received)
    with pytest.raises(ZeroDivisionError):
        with deferred() as pending:
            assert signal.getsignal(number) is not raise_received
            pending.obey(pending.number or 0)
            1 / 0
    assert signal.getsignal(number) is raise_received


def test_a_handler_that_returns_still_ends_the_run(number):
    received = []
    signal.signal(number, lambda number, frame: received.append(number))
    with pytest.raises(KeyboardInterrupt):
        with deferred() as pending:
            signal.raise_signal(number)
            pending.obey(pending.number or 0)
    assert received == [number]


def test_a_signal_that_is_ignored_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)  # as under nohup
    with deferred() as pending:
        signal.raise_signal(number)
        pending.obey(pending.number or 0)
        assert signal.getsignal(number) is signal.SIG_IGN


def test_another_thread_receives_no_signals_and_changes_no_handler(number):
    signal.signal(number, raise_received)
    seen = []

    def run():
        with deferred() as pending:
            seen.append(signal.getsignal(number))
            pending.obey(pending.number or 0)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [raise_received]


@pytest.mark.parametrize("first, second, code, said", [
    ("SIGINT", "SIGINT", 130, "first\n"), ("SIGINT", "SIGTERM", 143, "first\n"),
    ("SIGHUP", "SIGHUP", -signal.SIGHUP, "first\nsaved\n"),
])
def test_the_second_signal_ends_the_process_at_once(first, second, code, said):
    """But for SIGHUP: the shell sends it as it ends, and then the system does."""
    done = run(f"""
with deferred():
    signal.raise_signal(signal.{first})
    print("first", flush=True)
    signal.raise_signal(signal.{second})
    print("saved", flush=True)
""")
    assert (done.returncode, done.stdout) == (code, said)


def test_sigusr1_shows_where_each_thread_stands_and_ends_nothing():
    done = run("""
def stands_here():
    signal.raise_signal(signal.SIGUSR1)
with deferred():
    stands_here()
print("goes on")
""")
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert " in stands_here\n" in done.stderr


@pytest.mark.parametrize("handler", ["print", "signal.SIG_IGN"])
def test_a_handler_of_sigusr1_stays(handler):
    done = run(f"""
signal.signal(signal.SIGUSR1, {handler})
with deferred():
    signal.raise_signal(signal.SIGUSR1)
""")
    assert (done.returncode, done.stderr) == (0, "")


def run(program):
    """A process that runs it, at its end."""
    program = f"import signal; from towers.machine.signals import deferred\n{program}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)


def test_signals_end_a_forked_child_as_if_none_were_deferred():
    context = multiprocessing.get_context("fork")
    with deferred() as pending:
        children = [context.Process(target=time.sleep, args=(30,)) for _ in range(5)]
        for child in children:
            child.start()
            child.terminate()  # it may arrive before the child runs a line of Python
        for child in children:
            child.join(10)
        ended = [child.exitcode for child in children]
        for child in children:
            child.kill()
        assert ended == [-signal.SIGTERM] * len(children)
        assert pending.number is None
        assert signal.getsignal(signal.SIGTERM) == pending.receive
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
