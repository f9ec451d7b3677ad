"""Signals: the first is passed on to the workers, which save; the second kills them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from towers.launch.worker import Worker
from towers.machine.signals import not_ignored


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
    before = {number: signal.getsignal(number) for number in not_ignored()}
    for number in before:
        signal.signal(number, stop.receive)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
