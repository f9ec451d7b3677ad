"""What tests ask of processes that are not their own children, and disks that some see alone."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-euc")
READ_ONLY = 'mount --bind . . && mount -o remount,bind,ro . && cd "$PWD" && exec "$@"'
SMALL_DISK = """
    mkdir disk && mount -t tmpfs -o size=1M tmpfs disk && cd disk
    "$@" || code=$?
    rm filler && cp -R run .. && exit ${code:-0}
"""


def children(pid):
    """The processes that another's main thread has started, in order, and not yet waited for."""
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def has_ended(pid, seconds=10.0):
    """Whether a process, no child of this one, ends in this time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # nobody has asked for its exit code yet
            return True
        time.sleep(0.02)
    return False


def wait_for(*paths, seconds=30.0):
    """Waits until these files hold whole lines; returns their texts."""
    until = time.monotonic() + seconds
    while not all(path.exists() and path.read_text().endswith("\n") for path in paths):
        assert time.monotonic() < until, f"{paths} do not come"
        time.sleep(0.02)
    return [path.read_text() for path in paths]


def skip_where_nothing_can_be_mounted(cwd):
    """As in many containers."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1) here")
    for script in (READ_ONLY, 'mount -t tmpfs -o size=1M tmpfs . && "$@"'):
        done = subprocess.run([*NAMESPACE, script, "sh", "true"], cwd=cwd, capture_output=True)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
