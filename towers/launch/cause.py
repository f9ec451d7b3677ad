"""How the workers have ended, and which of the ends explains the others."""

import signal
from collections.abc import Sequence
from typing import NamedTuple

from towers.command_line import HUNG_UP, INTERRUPTED, TERMINATED, USER_MISTAKE
from towers.machine.cluster import LOST_WORKER

STOPPED = (INTERRUPTED, TERMINATED, HUNG_UP)


class End(NamedTuple):
    """One worker's end.

    worker: its index.
    code: its exit code, negative for a signal.
    told: it was asked to end before.
    killed: it had to be killed, for it did not end when it was asked to.
    """

    worker: int
    code: int
    told: bool = False
    killed: bool = False

    @property
    def is_loss(self) -> bool:
        """Whether a worker was lost: this one, or one that this one has missed."""
        return self.code < 0 or self.code == LOST_WORKER

    @property
    def is_stop(self) -> bool:
        """Whether the worker was stopped by a signal, and has saved."""
        return self.code in STOPPED


def cause(ends: Sequence[End]) -> End | None:
    """The end that explains the others; None where all have ended well, or as they were asked to.

    It is the first that failed by itself; of a mistake that several workers have found, the first
    worker's. Who has lost another worker explains nothing, unless no other worker failed.

    Args:
        ends: of all workers, in the order in which they came.
    """
    own = [e for e in ends if not (e.told or e.is_stop) and e.code not in (0, LOST_WORKER)]
    if own and own[0].code == USER_MISTAKE:
        return min(end for end in own if end.code == USER_MISTAKE)
    stopped = [end for end in ends if not end.told and end.is_stop]
    late = [end for end in ends if end.told and end.code > 0 and not (end.is_stop or end.is_loss)]
    alone = [end for end in ends if not end.told and end.code == LOST_WORKER]
    return next(iter([*own, *stopped, *late, *alone]), None)


def lost_worker(ends: Sequence[End], why: End) -> int:
    """The worker to go on without.

    Args:
        ends: of all workers.
        why: the `cause`, a loss.

    Returns:
        The one that a signal has ended; else the one that no longer answered; else the last.
    """
    if why.code < 0:
        return why.worker
    silent = [end.worker for end in ends if end.killed]
    return silent[0] if silent else max(end.worker for end in ends)


def in_words(end: End) -> str:
    """"worker 1 was killed by SIGKILL"."""
    if end.code >= 0:
        return f"worker {end.worker} ended with exit code {end.code}"
    name = signal.Signals(-end.code).name
    hint = " (is there too little memory?)" if name == "SIGKILL" else ""
    return f"worker {end.worker} was killed by {name}{hint}"


def by_weight(ends: Sequence[End]) -> list[End]:
    """Ends that were seen at the same moment: mistakes first, then signals, then other failures."""
    def weight(end: End) -> int:
        return 0 if end.code == USER_MISTAKE else 1 if end.code < 0 else 2

    return sorted(ends, key=lambda end: (weight(end), end.worker))
