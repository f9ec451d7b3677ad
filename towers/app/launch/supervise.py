"""The workers of a run, from their start to the end of the last."""

import math
import selectors
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from towers.app.command_line import HUNG_UP, INTERRUPTED, TERMINATED, USER_MISTAKE
from towers.app.launch.screen import Screen
from towers.app.launch.worker import Worker
from towers.workers.cluster import LOST_WORKER
from towers.machine.signals import handled_by

_PAUSE = 0.05  # seconds between two looks at who has ended
_SETTLE = 1.0  # after the first failure: another worker may have failed before, and still end
_END = 5.0  # from SIGTERM to SIGKILL
_SAVE = 300.0  # after the first worker has stopped: the chief saves
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


class Stop:
    """The signal that has come, if one has.

    number: of the first signal; None before.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._workers: list[Worker] = []

    def add(self, worker: Worker) -> None:
        """A worker has started; a signal that has come before is passed on to it, too."""
        self._workers.append(worker)
        if self.number is not None:
            worker.ask_to_end(self.number)

    def remove(self, worker: Worker) -> None:
        """A worker has ended."""
        self._workers.remove(worker)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The signals' handler; a closed terminal may tell of itself twice."""
        del frame
        if self.number is not None and number == signal.SIGHUP:
            return
        is_second = self.number is not None
        if not is_second:
            self.number = number
        for worker in self._workers:
            if is_second:
                worker.kill()
            else:
                worker.ask_to_end(number)


@contextmanager
def passed_on() -> Iterator[Stop]:
    """Signals are passed on, inside; those that are ignored, as under nohup, stay ignored."""
    stop = Stop()
    with handled_by(stop.receive):
        yield stop


class Ended(NamedTuple):
    """The ends of all workers.

    ends: in the order in which they came.
    errors: {worker: lines of stderr that nobody has seen}.
    directory: of the run, where the chief has named it.
    """

    ends: list[End]
    errors: dict[int, list[bytes]]
    directory: str | None


def supervise(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], screen: Screen, stop: Stop
) -> Ended:
    """Runs one worker for each environment. When one fails, the others end within seconds.

    Args:
        command: what each of them runs.
        environments: of the workers, with their TF_CONFIG.
        screen: where their lines go.
        stop: passes signals on.

    Raises:
        ValueError: a worker cannot be started; those that have are killed.
    """
    workers: list[Worker] = []
    try:
        for index, environment in enumerate(environments):
            workers.append(_started(index, command, environment, screen))
            stop.add(workers[-1])
        return _watch(workers, stop)
    finally:
        for worker in workers:
            worker.kill()


def _started(
    index: int, command: Sequence[str], environment: Mapping[str, str], screen: Screen
) -> Worker:
    try:
        return Worker(index, command, environment, screen)
    except OSError as error:
        raise ValueError(
            f"worker {index} cannot be started: {error.strerror}. Use fewer --workers."
        ) from error


def _watch(workers: Sequence[Worker], stop: Stop) -> Ended:
    running, ends = list(workers), list[End]()
    limit = _Limit(stop)
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            for source in worker.sources:
                selector.register(source, selectors.EVENT_READ, worker)
        while running:
            for key, _ in selector.select(_PAUSE):
                if not key.data.read(key.fd):
                    selector.unregister(key.fd)
            gone = [worker for worker in running if worker.has_ended()]
            for worker in gone:
                for source in worker.sources:
                    if source in selector.get_map():
                        selector.unregister(source)
                worker.close()
                stop.remove(worker)
                running.remove(worker)
            new = by_weight([_end(worker) for worker in gone])
            ends += new
            limit.apply(new, running)
            for worker in running:
                worker.show_overdue()
                worker.fit_terminal()
    errors = {worker.index: worker.take_errors() for worker in workers}
    return Ended(ends, errors, workers[0].directory)


def _end(worker: Worker) -> End:
    assert worker.code is not None
    return End(worker.index, worker.code, worker.told, worker.killed)


class _Limit:
    """The time that remaining workers may run, once others have ended."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._ask_at = self._kill_at = math.inf
        self._has_stopped = False

    def apply(self, new: Sequence[End], running: Sequence[Worker]) -> None:
        """Asks who has run too long to end, and kills who has not ended then.

        Args:
            new: ends that have just come.
            running: the workers that are left.
        """
        now = time.monotonic()
        for end in new:
            self._ask_at = min(self._ask_at, now + self._patience(end))
        if now >= self._ask_at:
            self._ask_at, self._kill_at = math.inf, min(self._kill_at, now + _END)
            for worker in running:
                worker.ask_to_end(signal.SIGTERM)
        if now >= self._kill_at:
            for worker in running:
                worker.kill()

    def _patience(self, end: End) -> float:
        """The seconds that a worker's end leaves the others."""
        number = self._stop.number
        self._has_stopped |= number is not None or end.is_stop
        if end.code == 0 or number is not None and (end.is_stop or end.code == -number):
            return math.inf  # a second Ctrl-C ends who does not
        return _SAVE if self._has_stopped else _SETTLE
