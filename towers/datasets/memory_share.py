"""Whether data may stay in memory: a quarter of what this process may use."""

import os
import resource
from pathlib import Path

MEMORY_SHARE = 0.25  # what takes more of it is read while training runs
_CGROUP = Path("/sys/fs/cgroup/memory.max")  # version 2, as containers see their own


def usable_memory() -> int:
    """Bytes: the machine's, or less where a limit of this process or its container says so."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    try:
        limits.append(int(_CGROUP.read_text(encoding="ascii")))
    except (OSError, ValueError):  # there is none, or it is "max"
        pass
    return min(limits)


def fits(num_bytes: int, share: float = MEMORY_SHARE) -> bool:
    """Whether so many bytes may stay in memory."""
    return num_bytes <= share * usable_memory()
