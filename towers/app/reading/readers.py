"""Reads examples in processes, which share the work of each batch.

    indices of a batch  ->  chunks  ->  chunk k to process k % N  ->  arrays of that batch

Batches are bit-identical for any number of processes, because chunks are joined in their order.
Processes are spawned, not forked: TensorFlow's threads would not survive a fork.
"""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from towers.app.named import one_line
from towers.app.reading.examples import Source

_MOST_AT_ONCE = 512  # indices in a chunk: several chunks fit into a pipe, so that `ask` never waits
_AHEAD = 2  # chunks that each process is asked for in advance

Arrays = list[np.ndarray]


class Readers:
    """Reads batches of a source in processes, in one iteration at a time."""

    def __init__(self, source: Source, num_processes: int) -> None:
        self._source, self._num_processes = source, num_processes
        self._readers: list[_Reader] = []
        self._asked: deque[tuple[_Reader, np.ndarray | None]] = deque()

    def read(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, Arrays]]:
        """Yields, for each batch of B indices, the indices and an array for each leaf.

        An array has a row for each index that is not negative.
        An iteration that began before this one must not continue.
        """
        if not self._readers:
            count = self._num_processes
            self._readers = [_Reader(self._source, count) for _ in range(count)]
        parts: list[Arrays] = []
        try:
            while self._asked:  # answers to an abandoned iteration
                self._asked.popleft()[0].answer()
            chunks = _chunks(batches, len(self._readers))
            for reader, (indices, batch) in zip(itertools.cycle(self._readers), chunks):
                reader.ask(indices)
                self._asked.append((reader, batch))
                if len(self._asked) >= _AHEAD * len(self._readers):
                    yield from self._received(parts)
            while self._asked:
                yield from self._received(parts)
        except ValueError:
            self.close()  # the next iteration begins with new readers
            raise

    def close(self) -> None:
        """Ends the processes."""
        for reader in self._readers:
            reader.close()
        self._readers = []
        self._asked.clear()

    def _received(self, parts: list[Arrays]) -> Iterator[tuple[np.ndarray, Arrays]]:
        """Adds the next chunk to the parts of its batch; yields the batch when it is complete."""
        reader, batch = self._asked.popleft()
        answer = reader.answer()
        if isinstance(answer, str):
            raise ValueError(answer)
        parts.append(answer)
        if batch is not None:
            yield batch, [np.concatenate(leaf) for leaf in zip(*parts, strict=True)]
            parts.clear()


def _chunks(
    batches: Iterable[np.ndarray], num_readers: int
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields the indices of each chunk, with all indices of its batch after the last chunk."""
    for batch in batches:
        read = batch[batch >= 0]
        count = min(len(read), max(num_readers, -(-len(read) // _MOST_AT_ONCE)))
        *parts, last = np.array_split(read, count)
        yield from ((part, None) for part in parts)
        yield last, batch


class _Reader:
    """Reads chunks in a process, which ends with this one, or when its connection is closed."""

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
        """Returns the arrays of the oldest chunk asked for, or the message of an error."""
        try:
            answer = self._connection.recv()
            if isinstance(answer, str):
                return answer
            arrays = [np.empty(shape, dtype) for shape, dtype in answer]
            for array in arrays:
                self._connection.recv_bytes_into(_bytes(array))
            return arrays
        except (EOFError, OSError):
            self._process.join()
            code, index = self._process.exitcode or 0, self._index.value
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            why = (
                f"at example {index}. If memory was too small, use fewer `data_workers`."
                if index >= 0 else
                "before the first one. It imports the script that runs: begin that with "
                "if __name__ == '__main__', or use data_workers=0."
            )
            raise ValueError(
                f"{self._where}: a process that reads examples has ended {how} {why}"
            ) from None


def _serve(source: Source, connection: Any, current: Any) -> None:
    """Runs in a process: reads and sends the arrays of each chunk until it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    for number in (signal.SIGINT, signal.SIGHUP):  # the training process alone handles these
        signal.signal(number, signal.SIG_IGN)

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)  # even while the source hangs

    threading.Thread(target=end_with_parent, daemon=True).start()
    begin = partial(setattr, current, "value")
    with suppress(EOFError, OSError):  # the training process has ended
        while True:
            indices = connection.recv()
            try:
                arrays = source.read(indices, begin)
            except ValueError as error:
                connection.send(str(error))
                continue
            # Arrays go as raw bytes: pickle would copy them twice.
            connection.send([(array.shape, array.dtype) for array in arrays])
            for array in arrays:
                connection.send_bytes(_bytes(array))


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
