"""Tells whether data may stay in memory: they may take a quarter of the usable memory."""

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MEMORY_SHARE = 0.25  # data that take more are read while training runs
GROUPS = Path("/proc/self/cgroup")  # the control groups of this process
MOUNTED = Path("/sys/fs/cgroup")


def usable_memory() -> int:
    """Returns the bytes of memory of the machine, or a lower limit of the process or container."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    for path in _limit_files():
        with suppress(OSError, ValueError):  # there is no such file, or it holds "max"
            limits.append(int(path.read_text(encoding="ascii")))
    return min(limits)


def fits(num_bytes: int) -> bool:
    """Whether data of this size may stay in memory."""
    return num_bytes <= MEMORY_SHARE * usable_memory()


def _limit_files() -> Iterator[Path]:
    """Yields the files that hold the memory limit of this process's control group: cgroups(7)."""
    try:
        lines = GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            yield MOUNTED / path.lstrip("/") / "memory.max"
        elif "memory" in controllers.split(","):
            yield MOUNTED / "memory" / path.lstrip("/") / "memory.limit_in_bytes"
