"""Disks that a command alone sees, and that end with it."""

import shutil
import subprocess

import pytest

NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-euc")
READ_ONLY = 'mount --bind . . && mount -o remount,bind,ro . && cd "$PWD" && exec "$@"'
SMALL_DISK = """
    mkdir disk && mount -t tmpfs -o size=1M tmpfs disk && cd disk
    "$@" || code=$?
    rm filler && cp -R run .. && exit ${code:-0}
"""


def skip_where_nothing_can_be_mounted(cwd):
    """As in many containers."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1) here")
    for script in (READ_ONLY, 'mount -t tmpfs -o size=1M tmpfs . && "$@"'):
        done = subprocess.run([*NAMESPACE, script, "sh", "true"], cwd=cwd, capture_output=True)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
