"""Readers of examples: a thread, or processes, each its share of every batch, in order.

    indices of a batch  ->  chunks  ->  chunk k to reader k % N  ->  arrays of that batch

The number of readers changes no bit: who asks, in which order, is fixed by the chunks alone. A
process is told what to read, and answers, over a pipe of its own: where either end is gone the
other one knows it. It is not forked: TensorFlow's threads would not survive that.
"""

import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np

from towers.app.named import one_line
from towers.app.reading.examples import Source

_MOST_AT_ONCE = 512  # indices of a chunk: several fit into a pipe, so that asking never waits
_AHEAD = 2  # chunks that each reader has been asked for

Arrays = list[np.ndarray]


class Chunk(NamedTuple):
    """Examples that one reader reads at once.

    indices: which. batch: the indices of the whole batch where this is its last chunk, else None.
    """

    indices: np.ndarray
    batch: np.ndarray | None


class _Reader(Protocol):
    close: Callable[[], Any]

    def ask(self, number: int, indices: np.ndarray) -> None: ...

    def answer(self, number: int) -> Arrays: ...


class Readers:
    """Reads batches of a source; one iteration at a time."""

    def __init__(self, source: Source, num_processes: int, timeout: float) -> None:
        """
        Args:
            source: what is read.
            num_processes: that read; 0: a thread of this process.
            timeout: seconds that one example may take.
        """
        self._source, self._num_processes, self._timeout = source, num_processes, timeout
        self._readers: list[_Reader] = []
        self._numbers = itertools.count()  # of the chunks: an answer to an older question is left

    def read(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, Arrays]]:
        """The examples of each batch: its indices, and an array [B, ...] for each leaf.

        An iteration that began before this one must not go on.

        Raises:
            ValueError: an example cannot be read, is unlike the first one, or takes too long;
                the source has another length than before; or a process has ended.
        """
        if not self._readers:
            self._readers = self._start()
        parts: list[Arrays] = []
        try:
            for chunk, arrays in self._answers(_chunks(batches, len(self._readers))):
                parts.append(arrays)
                if chunk.batch is not None:
                    yield chunk.batch, _joined(parts)
                    parts = []
        except ValueError:
            self.close()  # the next iteration begins with new ones
            raise

    def close(self) -> None:
        """Ends the readers; a thread, when its source lets it."""
        for reader in self._readers:
            reader.close()
        self._readers = []

    def _answers(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Arrays]]:
        under_way: deque[tuple[_Reader, int, Chunk]] = deque()
        for reader, chunk in zip(itertools.cycle(self._readers), chunks, strict=False):
            number = next(self._numbers)
            reader.ask(number, chunk.indices)
            under_way.append((reader, number, chunk))
            if len(under_way) >= _AHEAD * len(self._readers):
                reader, number, chunk = under_way.popleft()
                yield chunk, reader.answer(number)
        for reader, number, chunk in under_way:
            yield chunk, reader.answer(number)

    def _start(self) -> list[_Reader]:
        if self._num_processes == 0:
            return [_Thread(self._source, self._timeout)]
        try:
            pickled = pickle.dumps(self._source)
        except Exception as error:  # pickle raises many kinds
            raise ValueError(
                f"{self._source.where} cannot be sent to data_workers={self._num_processes} "
                f"processes: {one_line(error)}. Open files when they are first read, or use "
                "data_workers=0."
            ) from None
        return [
            _Process(pickled, self._source.where, self._timeout)
            for _ in range(self._num_processes)
        ]


def _chunks(batches: Iterable[np.ndarray], num_readers: int) -> Iterator[Chunk]:
    for batch in batches:
        count = min(len(batch), max(num_readers, -(-len(batch) // _MOST_AT_ONCE)))
        parts = np.array_split(batch, count)
        for part in parts[:-1]:
            yield Chunk(part, None)
        yield Chunk(parts[-1], batch)


def _joined(parts: list[Arrays]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    return [np.concatenate(leaf) for leaf in zip(*parts, strict=True)]


# The two kinds of readers


class _Thread:
    """A thread of this process. Where its source hangs it stays behind until the process ends."""

    def __init__(self, source: Source, timeout: float) -> None:
        self._where, self._timeout = source.where, timeout
        self._progress = SimpleNamespace(value=-1)
        self._asked: SimpleQueue = SimpleQueue()
        self._answers: SimpleQueue = SimpleQueue()
        arguments = (source, self._asked.get, self._answers.put, self._progress)
        threading.Thread(target=_serve, args=arguments, daemon=True, name="towers-reader").start()
        self.close: Callable[[], Any] = weakref.finalize(self, self._asked.put, None)

    def ask(self, number: int, indices: np.ndarray) -> None:
        self._asked.put((number, indices))

    def answer(self, number: int) -> Arrays:
        return _answer(number, self._receive, self._progress, self._timeout, self._where)

    def _receive(self, timeout: float) -> Any:
        try:
            return self._answers.get(timeout=timeout)
        except Empty:
            return None


class _Process:
    """A process of its own, which ends with this one."""

    def __init__(self, pickled: bytes, where: str, timeout: float) -> None:
        self._where, self._timeout = where, timeout
        context = multiprocessing.get_context("spawn")
        self._progress = context.RawValue("q", -1)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve_process, args=(pickled, theirs, self._progress), daemon=True,
            name="towers-reader",
        )
        self._process.start()
        theirs.close()  # so that this end knows when the process is gone
        self.close: Callable[[], Any] = weakref.finalize(
            self, _end, self._process, self._connection
        )

    def ask(self, number: int, indices: np.ndarray) -> None:
        try:
            self._connection.send((number, indices))
        except OSError:
            raise self._gone() from None

    def answer(self, number: int) -> Arrays:
        return _answer(number, self._receive, self._progress, self._timeout, self._where)

    def _receive(self, timeout: float) -> Any:
        try:
            return _receive(self._connection) if self._connection.poll(timeout) else None
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> ValueError:
        self._process.join()
        code = self._process.exitcode or 0
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        index = self._progress.value
        if index < 0:
            return ValueError(
                f"{self._where}: a process that reads examples has ended {how} before the first "
                "one. It imports the script that runs: begin that with if __name__ == "
                "'__main__', or use data_workers=0."
            )
        return ValueError(
            f"{self._where}: a process that reads examples has ended {how} at example {index}. "
            "Where the memory was too small use fewer `data_workers`."
        )


def _end(process: Any, connection: Connection) -> None:
    process.kill()
    process.join()
    connection.close()


def _answer(
    number: int,
    receive: Callable[[float], Any],
    progress: Any,
    timeout: float,
    where: str,
) -> Arrays:
    """A reader's answer to that question.

    Raises:
        ValueError: it is an error, or one example takes longer than the timeout.
    """
    index = None
    while True:
        received = receive(timeout)
        if received is None and index is not None and index == progress.value:
            what = f"example {index} takes" if index >= 0 else "the first example takes"
            raise ValueError(
                f"{where}: {what} longer than data_timeout={timeout:g} seconds. Mend what it "
                "waits for, or allow more; `resume` then goes on from there."
            )
        index = progress.value
        if received is not None and received[0] == number:
            if isinstance(received[1], str):
                raise ValueError(received[1])
            return received[1]  # type: ignore[no-any-return]


# What they do


def _serve(
    source: Source, receive: Callable[[], Any], send: Callable[[Any], None], progress: Any
) -> None:
    """Answers questions until there is none."""

    def begin(index: int) -> None:
        progress.value = index

    while (question := receive()) is not None:
        number, indices = question
        try:
            answer: Arrays | str = source.read(indices, begin)
        except ValueError as error:
            answer = str(error)
        except MemoryError as error:
            answer = f"{source.where}: {one_line(error)}. Use fewer `data_workers`."
        send((number, answer))


def _serve_process(pickled: bytes, connection: Connection, progress: Any) -> None:
    """The whole life of a process that reads."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's, for the one that trains
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        source = pickle.loads(pickled)
    except Exception as error:  # whatever the user's module raises
        source = _Unreadable(one_line(error))
    try:
        _serve(source, connection.recv, lambda answer: _send(connection, *answer), progress)
    except (EOFError, OSError):
        return  # nobody asks any more


def _send(connection: Connection, number: int, answer: Arrays | str) -> None:
    """An answer; arrays as they lie in memory, which pickling would copy twice."""
    if isinstance(answer, str):
        connection.send((number, answer))
        return
    connection.send((number, [(array.shape, array.dtype) for array in answer]))
    for array in answer:
        connection.send_bytes(_bytes(array))


def _receive(connection: Connection) -> tuple[int, Arrays | str]:
    """Receives a message of `_send`."""
    number, answer = connection.recv()
    if isinstance(answer, str):
        return number, answer
    arrays = [np.empty(shape, dtype) for shape, dtype in answer]
    for array in arrays:
        connection.recv_bytes_into(_bytes(array))
    return number, arrays


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


class _Unreadable:
    """Stands for a source that a process cannot unpickle."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def read(self, indices: np.ndarray, begin: Callable[[int], None]) -> Arrays:
        raise ValueError(
            f"the source of examples cannot be unpickled in another process: {self._reason}. "
            "Define its class in a module, or use data_workers=0."
        )


def _end_with_parent() -> None:
    """Ends this process when its parent ends, even while the source hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
