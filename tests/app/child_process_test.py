"""A child process ends with the one that started it, however that one ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import has_ended

# Starts a child that would sleep for long, and prints its process id.
STARTER = """
import sys, time
from towers.app import child_process
child = child_process.start([sys.executable, "-c", "import time, towers; time.sleep(100)"])
print(child.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone knows prctl")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(number):
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    pid = int(starter.stdout.readline())
    assert not has_ended(pid, 0.2)
    starter.send_signal(number)
    assert has_ended(pid)
    starter.communicate()
