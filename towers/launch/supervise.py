"""The workers of a run, from their start to the end of the last."""

import math
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from towers.launch.cause import End, by_weight
from towers.launch.screen import Screen
from towers.launch.stop import Stop
from towers.launch.worker import Worker

_PAUSE = 0.05  # seconds between two looks at who has ended
_SETTLE = 1.0  # after the first failure: another worker may have failed before, and still end
_END = 5.0  # from SIGTERM to SIGKILL
_SAVE = 300.0  # after the first worker has stopped: the chief saves


class Ended(NamedTuple):
    """How all of them have ended.

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
    """How long the workers that are left may run, once others have ended."""

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
