"""What tests ask of processes that are not their own children."""

import time
from pathlib import Path


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
