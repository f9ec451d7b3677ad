"""Reads examples in order, in a thread or in processes, which share the work of each batch.

    indices of a batch  ->  chunks  ->  chunk k to reader k % N  ->  arrays of that batch

Batches are bit-identical for any number of readers, because chunks are joined in their order.
Processes are spawned, not forked: TensorFlow's threads would not survive a fork.
"""

import itertools
import multiprocessing
import os
import queue
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from towers.app.named import one_line
from towers.app.reading.examples import MEND, Source

_MOST_AT_ONCE = 512  # indices in a chunk: several chunks fit into a pipe, so that `ask` never waits
_AHEAD = 2  # chunks that each reader is asked for in advance

Arrays = list[np.ndarray]


class Readers:
    """Reads batches of a source, in one iteration at a time."""

    def __init__(self, source: Source, num_processes: int, timeout: float) -> None:
        """
        Args:
            source: the examples to read.
            num_processes: the number of processes that read; 0: a thread of this process reads.
            timeout: the seconds that one example may take.
        """
        self._source, self._num_processes, self._timeout = source, num_processes, timeout
        self._readers: list[_Reader] = []
        self._asked: deque[tuple[_Reader, np.ndarray | None]] = deque()

    def read(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, Arrays]]:
        """Yields, for each batch of B indices, the indices and an array [B, ...] for each leaf.

        An iteration that began before this one must not continue.

        Raises:
            ValueError: an example cannot be read, differs from the first one, or takes too long;
                or a process has ended.
        """
        if not self._readers:
            count, source = self._num_processes, self._source
            self._readers = [_Reader(source, self._timeout, count) for _ in range(count or 1)]
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
        """Ends the readers; a thread ends after the chunks that it was asked for."""
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
            first, *others = parts
            leaves = zip(*parts, strict=True)
            yield batch, [np.concatenate(leaf) for leaf in leaves] if others else first
            parts.clear()


def _chunks(
    batches: Iterable[np.ndarray], num_readers: int
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields the indices of each chunk, with all indices of its batch after the last chunk."""
    for batch in batches:
        count = min(len(batch), max(num_readers, -(-len(batch) // _MOST_AT_ONCE)))
        *parts, last = np.array_split(batch, count)
        yield from ((part, None) for part in parts)
        yield last, batch


class _Reader:
    """Reads chunks in a process, which ends with this one, or in a thread for 0 processes.

    A thread whose source hangs remains until this process ends.
    """

    def __init__(self, source: Source, timeout: float, num_processes: int) -> None:
        self._where, self._timeout = source.where, timeout
        context = multiprocessing.get_context("spawn")
        self._index = context.RawValue("q", -1)  # the index of the example that is being read
        kind: Any = context.Process if num_processes else threading.Thread
        queues = [queue.Queue[Any](), queue.Queue[Any]()]
        ends: Any = context.Pipe() if num_processes else (_End(*queues), _End(*queues[::-1]))
        self._connection, theirs = ends
        self._worker = kind(target=_serve, args=(source, theirs, self._index), daemon=True)
        try:
            self._worker.start()
        except Exception as error:  # pickle raises many types of errors
            raise ValueError(
                f"{source.where} cannot be sent to data_workers={num_processes} processes: "
                f"{one_line(error)}. Open files when they are first read, or use data_workers=0."
            ) from None
        theirs.close()  # so that this end gets an EOFError when the process ends
        self.close = weakref.finalize(self, _end, self._worker, self._connection)

    def ask(self, indices: np.ndarray) -> None:
        try:
            self._connection.send(indices)
        except OSError:
            raise self._gone() from None

    def answer(self) -> Arrays | str:
        """Returns the arrays of the oldest chunk asked for, or the message of an error.

        Raises:
            ValueError: one example takes longer than the timeout, or the process has ended.
        """
        index = None
        try:
            while not self._connection.poll(self._timeout):
                if index == (index := self._index.value):
                    what = f"example {index}" if index >= 0 else "the first example"
                    raise ValueError(
                        f"{self._where}: {what} takes longer than data_timeout={self._timeout:g} "
                        "seconds. Fix its cause or raise `data_timeout`, then continue with "
                        "`resume`."
                    )
            return _receive(self._connection)
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> ValueError:
        self._worker.join()
        code, index = self._worker.exitcode or 0, self._index.value
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return ValueError(
            f"{self._where}: a process that reads examples has ended {how} " + (
                f"at example {index}. Where the memory was too small use fewer `data_workers`."
                if index >= 0 else
                "before the first one. It imports the script that runs: begin that with "
                "if __name__ == '__main__', or use data_workers=0."
            )
        )


class _End:
    """Acts as an end of a pipe between two threads, with multiprocessing's methods and no copy."""

    def __init__(self, received: queue.Queue, sent: queue.Queue) -> None:
        self._received, self.recv, self.send = received, received.get, sent.put

    def poll(self, timeout: float) -> bool:
        with (condition := self._received.not_empty):
            return bool(condition.wait_for(lambda: self._received.queue, timeout))

    def close(self) -> None:
        pass


def _end(worker: Any, connection: Any) -> None:
    if isinstance(worker, threading.Thread):
        connection.send(None)
        return
    worker.kill()
    worker.join()
    connection.close()


def _serve(source: Source, connection: Any, current: Any) -> None:
    """Runs a reader: reads and sends the arrays of each chunk until there are no more requests."""
    if threading.current_thread() is threading.main_thread():  # this is a reader process
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
        while (indices := connection.recv()) is not None:
            answer: Arrays | str
            try:
                answer = source.read(indices, begin)
            except ValueError as error:
                answer = str(error)
            except Exception as error:  # such as a MemoryError
                answer = f"{source.where}: {one_line(error)}. {MEND}"
            _send(connection, answer)


def _send(connection: Any, answer: Arrays | str) -> None:
    """Sends an answer. Arrays go between processes as raw bytes: pickle would copy them twice."""
    if isinstance(connection, _End) or isinstance(answer, str):
        connection.send(answer)
        return
    connection.send([(array.shape, array.dtype) for array in answer])
    for array in answer:
        connection.send_bytes(_bytes(array))


def _receive(connection: Any) -> Arrays | str:
    """Receives an answer of `_send`."""
    answer = connection.recv()
    if isinstance(connection, _End) or isinstance(answer, str):
        return answer  # type: ignore[no-any-return]
    arrays = [np.empty(shape, dtype) for shape, dtype in answer]
    for array in arrays:
        connection.recv_bytes_into(_bytes(array))
    return arrays


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
