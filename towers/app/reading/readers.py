"""Reads examples in processes, which share the work of each batch.

    indices of a batch  ->  a part for each of N processes  ->  their arrays, joined in order

Batches are bit-identical for any number of processes, because parts are joined in their order.
Processes are spawned, not forked: TensorFlow's threads would not survive a fork.
"""

import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from towers.app.child_process import outcome
from towers.app.named import one_line
from towers.app.reading.examples import Source

_AHEAD = 2  # batches that the processes are asked for in advance

Arrays = list[np.ndarray]


class Readers:
    """Reads batches of a source in processes, in one iteration at a time."""

    def __init__(self, source: Source, num_processes: int) -> None:
        self._source, self._num_processes = source, num_processes
        self._readers: list[_Reader] = []
        self._asked: deque[np.ndarray] = deque()  # batches that are not received yet

    def read(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, Arrays]]:
        """Yields, for each batch of B indices, the indices and an array for each leaf.

        An array has a row for each index that is not negative.
        An iteration that began before this one must not continue.
        """
        if not self._readers:
            count = self._num_processes
            self._readers = [_Reader(self._source, count) for _ in range(count)]
        while self._asked:  # answers to an abandoned iteration
            with suppress(ValueError):
                self._receive()
        try:
            for batch in batches:
                parts = np.array_split(batch[batch >= 0], len(self._readers))
                for reader, part in zip(self._readers, parts, strict=True):
                    reader.ask(part)
                self._asked.append(batch)
                if len(self._asked) >= _AHEAD:
                    yield self._receive()
            while self._asked:
                yield self._receive()
        except ValueError:
            self.close()  # the next iteration begins with new readers
            raise

    def close(self) -> None:
        """Ends the processes."""
        for reader in self._readers:
            reader.close()
        self._readers = []
        self._asked.clear()

    def _receive(self) -> tuple[np.ndarray, Arrays]:
        """Returns the oldest batch asked for. Raises ValueError if an example cannot be read."""
        batch = self._asked.popleft()
        answers = [reader.answer() for reader in self._readers]
        for answer in answers:
            if isinstance(answer, str):
                raise ValueError(answer)
        return batch, [np.concatenate(leaf) for leaf in zip(*answers, strict=True)]


class _Reader:
    """Reads parts of batches in a process, which ends with this one, or when it is closed."""

    def __init__(self, source: Source, num_processes: int) -> None:
        self._where = source.where
        context = multiprocessing.get_context("spawn")
        self._index = context.RawValue("q", -1)  # the index of the example that is being read
        self._connection, theirs = context.Pipe()
        arguments = source, theirs, self._index
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        try:
            self._process.start()
        except Exception as error:  # pickle raises many types of errors
            raise ValueError(
                f"{source.where} cannot be sent to data_workers={num_processes} processes: "
                f"{one_line(error)}. Open files when they are first read, or use data_workers=0."
            ) from None
        theirs.close()  # so that this end gets an EOFError when the process ends

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def ask(self, indices: np.ndarray) -> None:
        with suppress(OSError):  # `answer` then says that the process has ended
            self._connection.send(indices)

    def answer(self) -> Arrays | str:
        """Returns the arrays of the oldest part asked for, or the message of an error."""
        try:
            return self._connection.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self._process.join()
            how, index = outcome(self._process.exitcode or 0), self._index.value
            where = f"at example {index}. If memory was too small, use fewer `data_workers`."
            if index < 0:
                where = (
                    "before the first one. It imports the script that runs: begin that with "
                    "if __name__ == '__main__', or use data_workers=0."
                )
            raise ValueError(
                f"{self._where}: a process that reads examples {how} {where}"
            ) from None


def _serve(source: Source, connection: Connection, current: Any) -> None:
    """Runs in a process: reads and sends the arrays of each part until it is killed."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the training process alone handles these
        signal.signal(number, signal.SIG_IGN)
    asked: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()

    def receive() -> None:
        with suppress(EOFError, OSError):
            while True:
                asked.put(connection.recv())
        os._exit(1)  # the training process has ended; this one ends even while the source hangs

    # The thread receives while arrays are sent, so that neither process waits for the other.
    threading.Thread(target=receive, daemon=True).start()
    with suppress(OSError):  # the training process has ended
        while True:
            try:
                connection.send(source.read(asked.get(), partial(setattr, current, "value")))
            except ValueError as error:
                connection.send(str(error))
