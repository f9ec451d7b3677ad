"""A process ends with the one that started it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import has_ended
from towers.machine import parent

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone knows prctl")

# Starts a child that would sleep for long, and says its process id.
STARTER = """
import os, subprocess, sys, time
from functools import partial
from towers.machine import parent
sleep = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(100)"]
child = subprocess.Popen(sleep, preexec_fn=partial(parent.end_with, os.getpid()))
print(child.pid, flush=True)
time.sleep(100)
"""
IN_THE_CHILD = """
import os, time
from towers.machine import parent
parent.end_with(int({parent}))
print("goes on", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent_however_that_ends(number):
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = {starter.stdout.readline().strip() for _ in range(2)}  # of two processes: any order
    (pid,) = lines - {"ready"}
    assert not has_ended(int(pid), 0.2)
    starter.send_signal(number)
    assert has_ended(int(pid))
    starter.communicate()


@pytest.mark.parametrize("number, code", [(None, 0), (2**22 + 1, -signal.SIGKILL)],
                         ids=["in_time", "too_late"])
def test_a_child_that_comes_too_late_ends_at_once(number, code):
    number = number or os.getpid()
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_CHILD.format(parent=number)], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, check=False,
    )
    assert (done.returncode, done.stdout) == (code, "" if code else "goes on\n")


def test_a_system_without_it_goes_on(monkeypatch):
    monkeypatch.setattr(parent, "LIBC", None)
    parent.end_with(1)
