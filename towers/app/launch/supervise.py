"""Supervises the workers of a run, from their start until the last one has ended."""

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
from typing import IO, NamedTuple

from towers.app import child_process
from towers.app.command_line import HUNG_UP, INTERRUPTED, TERMINATED, pass_on
from towers.workers.cluster import LOST_WORKER

_PAUSE = 0.05  # seconds between two looks at which workers have ended
_SETTLE = 1.0  # seconds after the first failure; a worker that failed earlier may end later
_OBEY = 5.0  # seconds from SIGTERM to SIGKILL
_SAVE = 300.0  # seconds after the first worker has stopped, in which the chief saves
_TITLE = re.compile(r"towers \d[\w.]* \| .*\| run: (.+)")  # see `describe`


class End(NamedTuple):
    """Says how one worker ended."""

    worker: int  # its index
    code: int  # its exit code, negative for a signal
    was_asked: bool = False  # to end
    was_killed: bool = False  # because it did not end when it was asked to
    error: str = ""  # the text of its last line "error: ..." on stderr

    @property
    def is_loss(self) -> bool:
        """Whether a worker was lost: this one, or another one that this one waited for."""
        return self.code < 0 or self.code == LOST_WORKER

    @property
    def is_stop(self) -> bool:
        """Whether the worker was stopped by a signal, and has saved."""
        return self.code in (INTERRUPTED, TERMINATED, HUNG_UP)

    def __str__(self) -> str:
        text = f"worker {self.worker} {child_process.outcome(self.code)}"
        return f"{text}: {self.error}" if self.error else text


class Worker:
    """Runs one worker's process and shows its lines."""

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.directory: str | None = None  # the run's directory, once the chief has printed it
        self._index, self._error = index, ""
        self._was_asked = self._was_killed = False
        self._readers: list[Thread] = []
        self._process = child_process.start(
            command,
            environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone
        )

    def send_lines(self, lines: SimpleQueue) -> None:
        """Starts threads that put (self, line, is_error) into a queue for each line of output."""

        def read(stream: IO[bytes], is_error: bool) -> None:
            for line in stream:
                lines.put((self, line, is_error))

        for pipe in ((self._process.stdout, False), (self._process.stderr, True)):
            self._readers.append(Thread(target=read, args=pipe, daemon=True))
            self._readers[-1].start()

    def show(self, line: bytes, is_error: bool) -> None:
        """Shows a line that the worker wrote."""
        last = line.rstrip(b"\r\n").rpartition(b"\r")[2]  # a progress bar's last state
        text = last.decode(getattr(sys.stdout, "encoding", None) or "utf-8", "backslashreplace")
        marked = text
        if self._index:
            marked = f"[worker {self._index}] {text}"
        pass_on(marked, is_error)  # a script may color its lines
        if is_error and text.startswith("error: "):
            self._error = text.removeprefix("error: ").rstrip(". ")
        elif title := _TITLE.fullmatch(text):
            self.directory = title[1]

    def has_ended(self) -> bool:
        """Returns whether the process has ended, and all its lines are in the queue."""
        if self._process.poll() is None:
            return False
        for reader in self._readers:
            reader.join(timeout=1.0)  # a child of the worker may hold the stream open
        return True

    def end(self) -> End:
        """Returns how the worker ended; call it after `has_ended`."""
        code = self._process.returncode
        return End(self._index, code, self._was_asked, self._was_killed, self._error)

    def ask_to_end(self, number: int) -> None:
        """Sends a signal, once: a second one would interrupt the worker's save."""
        if not self._was_asked:
            self._was_asked = True
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the worker, and all processes that it has started."""
        if self._process.poll() is None:
            self._was_killed = True
            os.killpg(self._process.pid, signal.SIGKILL)


def supervise(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], stops: Sequence[int]
) -> tuple[list[End], str | None]:
    """Runs one worker for each environment; returns their ends in order, and the run's directory.

    If a worker fails, the others end within seconds. The first signal in `stops` is passed on to
    the workers; a second one kills them.
    """
    workers, ends, ask_at, kill_at = list[Worker](), list[End](), math.inf, math.inf
    lines: SimpleQueue[tuple[Worker, bytes, bool]] = SimpleQueue()
    try:
        for index, environment in enumerate(environments):
            workers.append(Worker(index, command, environment))
        for worker in workers:  # when all are started, as threads make a fork unsafe
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
                    patience = _SETTLE
                    if any(end.is_stop for end in ends):
                        patience = _SAVE
                    ask_at = min(ask_at, now + patience)
            if now >= ask_at:
                ask_at, kill_at = math.inf, min(kill_at, now + _OBEY)
            for worker in running:
                if stops or kill_at < math.inf:
                    worker.ask_to_end(stops[0] if stops else signal.SIGTERM)
                # The shell and the system may both send SIGHUP for one closed terminal.
                if now >= kill_at or len(stops) > 1 and stops[-1] != signal.SIGHUP:
                    worker.kill()
        return ends, workers[0].directory
    finally:
        for worker in workers:
            worker.kill()
