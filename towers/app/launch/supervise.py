"""The workers of a run, from their start to the end of the last."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, NamedTuple, TypeAlias

from towers.app import child_process
from towers.app.command_line import HUNG_UP, INTERRUPTED, TERMINATED, show
from towers.workers.cluster import LOST_WORKER

_PAUSE = 0.05  # seconds between two looks at which workers have ended
_SETTLE = 1.0  # after the first failure: another worker may have failed before, and still end
_OBEY = 5.0  # from SIGTERM to SIGKILL
_SAVE = 300.0  # after the first worker has stopped: the chief saves
_HOLD = 5.0  # of lines that look like an error: a process that failed ends within that time
_ERRORS = ("error: ", "Traceback (most recent call last):", "Fatal Python error: ", "stopped by ")
_TITLE = re.compile(r"towers \d[\w.]* \| .*\| run: (.+)")  # see `describe`

Lines: TypeAlias = "SimpleQueue[tuple[Worker, bytes, bool]]"  # (of, line, whether on stderr)


class End(NamedTuple):
    """One worker's end.

    worker: its index.
    code: its exit code, negative for a signal.
    was_asked: whether it was asked to end.
    was_killed: whether it had to be killed, because it did not end when it was asked to.
    errors: its last lines on stderr, from its error on; they have not been shown.
    """

    worker: int
    code: int
    was_asked: bool = False
    was_killed: bool = False
    errors: tuple[str, ...] = ()

    @property
    def is_loss(self) -> bool:
        """Whether a worker was lost: this one, or another that this one missed."""
        return self.code < 0 or self.code == LOST_WORKER

    @property
    def is_stop(self) -> bool:
        """Whether the worker was stopped by a signal, and has saved."""
        return self.code in (INTERRUPTED, TERMINATED, HUNG_UP)

    def __str__(self) -> str:
        """"worker 1 was killed by SIGKILL"."""
        return f"worker {self.worker} {child_process.outcome(self.code)}"


class Worker:
    """One worker's process.

    Lines of stderr that look like an error, and all lines after them, are held back until the
    worker has ended: if one worker fails, the others fail after it, and would hide its error.

    directory: the run's, once the chief has named it.
    """

    def __init__(
        self, index: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.directory: str | None = None
        self._index = index
        self._was_asked = self._was_killed = False
        self._held: list[str] = []
        self._held_since = math.inf
        self._readers: list[Thread] = []
        self._process = child_process.start(
            command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone
        )

    def send_lines(self, lines: Lines) -> None:
        """Starts threads that put all that the worker writes into a queue."""
        def read(stream: IO[bytes], is_error: bool) -> None:
            for line in stream:
                lines.put((self, line, is_error))

        assert self._process.stdout and self._process.stderr
        for stream, is_error in ((self._process.stdout, False), (self._process.stderr, True)):
            self._readers.append(Thread(target=read, args=(stream, is_error), daemon=True))
            self._readers[-1].start()

    def show(self, line: bytes, is_error: bool) -> None:
        """Shows a line that the worker wrote, or holds it back."""
        last = line.rstrip(b"\r\n").rpartition(b"\r")[2]  # of a bar that was drawn again and again
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        text = last.decode(encoding, "backslashreplace")
        marked = f"[worker {self._index}] {text}" if self._index else text
        if is_error and (self._held or text.startswith(_ERRORS)):
            self._held_since = min(self._held_since, time.monotonic())
            self._held.append(marked)
        else:
            show(marked, is_error)
            title = _TITLE.fullmatch(text)
            self.directory = title[1] if title else self.directory

    def show_held(self, seconds: float = _HOLD) -> None:
        """Shows lines that looked like an error for so long that they were none."""
        if time.monotonic() >= self._held_since + seconds:
            for line in self._held:
                show(line, is_error=True)
            self._held, self._held_since = [], math.inf

    def has_ended(self) -> bool:
        """Whether its process has ended, and all its lines have been put into the queue."""
        if self._process.poll() is None:
            return False
        for reader in self._readers:
            reader.join(timeout=1.0)  # what the worker started may hold the stream open
        return True

    def end(self) -> End:
        """Its end, after `has_ended`."""
        if self._process.returncode == 0:
            self.show_held(0.0)
        return End(self._index, self._process.returncode, self._was_asked, self._was_killed,
                   tuple(self._held))

    def ask_to_end(self, number: int) -> None:
        """Sends a signal, once: a second one would interrupt the worker's save."""
        if not self._was_asked:
            self._was_asked = True
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the worker at once, and all that it has started."""
        if self._process.poll() is None:
            self._was_killed = True
            with suppress(ProcessLookupError):  # it ends by itself, now
                os.killpg(self._process.pid, signal.SIGKILL)


def supervise(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], stops: Sequence[int]
) -> tuple[list[End], str | None]:
    """Runs one worker for each environment. If one fails, the others end within seconds.

    Args:
        command: what each worker runs.
        environments: variables of each worker, with its TF_CONFIG.
        stops: the signals that have come so far. The first is passed on, a second one kills.

    Returns:
        The ends in the order in which they came, and the run's directory if the chief named it.
    """
    workers: list[Worker] = []
    ends: list[End] = []
    lines: Lines = SimpleQueue()
    ask_at = kill_at = math.inf
    try:
        for index, environment in enumerate(environments):
            workers.append(Worker(index, command, environment))
        for worker in workers:  # after all are started: threads make a fork unsafe
            worker.send_lines(lines)
        running = list(workers)
        while running:
            gone = [worker for worker in running if worker.has_ended()]
            for _ in range(max(1, lines.qsize())):
                with suppress(Empty):
                    worker, line, is_error = lines.get(timeout=_PAUSE)
                    worker.show(line, is_error)
            now = time.monotonic()
            for worker in gone:
                running.remove(worker)
                ends.append(worker.end())
                if ends[-1].code and not stops:
                    patience = _SAVE if any(end.is_stop for end in ends) else _SETTLE
                    ask_at = min(ask_at, now + patience)
            if now >= ask_at:
                ask_at, kill_at = math.inf, min(kill_at, now + _OBEY)
            for worker in running:
                worker.show_held()
                if stops or kill_at < math.inf:
                    worker.ask_to_end(stops[0] if stops else signal.SIGTERM)
                # The shell and the system may both send SIGHUP for one closed terminal.
                if now >= kill_at or len(stops) > 1 and stops[-1] != signal.SIGHUP:
                    worker.kill()
        return ends, workers[0].directory
    finally:
        for worker in workers:
            worker.kill()
