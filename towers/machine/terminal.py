"""Keeps libraries' messages off the terminal: their stderr output goes to log.txt.

TensorFlow's import writes to file descriptor 2. Python's sys.stderr keeps the terminal.
"""

import faulthandler
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from towers.machine.files import open_to_append
from towers.machine.words import printable

SECONDS_BETWEEN_LINES = 10.0  # of the progress of long work
_MOST_TEXT = 2**24  # bytes
STDERR = 2  # leads to a run's log.txt while it trains


class CapturedStderr:
    """Holds the stderr output of libraries, in the file `path` after `move_to`."""

    path: Path | None = None

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def text(self) -> str:
        """Returns the end of the output before `move_to`; the next line is still appended."""
        file = self._file.fileno()
        begin = max(0, os.fstat(file).st_size - _MOST_TEXT)
        return os.pread(file, _MOST_TEXT, begin).decode(errors="replace")

    def move_to(self, path: Path) -> None:
        """Appends the output so far, and all further output, to a file."""
        with open_to_append(path) as log:
            os.dup2(log.fileno(), STDERR)
            self._file.seek(0)
            shutil.copyfileobj(self._file, log)
        self.path = path


@contextmanager
def quiet_stderr() -> Iterator[CapturedStderr]:
    """Holds libraries' messages, logs and warnings back, and drops those not moved to a file."""
    python_stderr = sys.stderr
    try:
        terminal = os.dup(STDERR)
    except OSError:  # it was closed
        terminal = os.open(os.devnull, os.O_WRONLY)
    # If the root logger has a handler, TensorFlow and absl install none.
    handler = logging.StreamHandler(_text_file(STDERR))
    handler.setFormatter(_Printable("%(levelname)s:%(name)s: %(message)s"))
    with tempfile.TemporaryFile() as buffer:
        sys.stderr = _text_file(terminal)
        os.dup2(buffer.fileno(), STDERR)
        # After a crash in C++, Python prints no error: faulthandler prints at least the stacks.
        faulthandler.enable(sys.stderr)
        logging.getLogger().addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield CapturedStderr(buffer)
        finally:
            logging.captureWarnings(False)
            logging.getLogger().removeHandler(handler)
            faulthandler.disable()
            sys.stderr.flush()
            sys.stderr = python_stderr
            os.dup2(terminal, STDERR)
            os.close(terminal)


class _Printable(logging.Formatter):
    """Formats libraries' messages, which may name files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), kept="\n")


def python_stderr() -> int:
    """Returns the descriptor of sys.stderr; `STDERR` if it has none, as in a notebook."""
    with suppress(AttributeError, OSError, ValueError):
        return sys.stderr.fileno()
    return STDERR


def _text_file(descriptor: int) -> TextIO:
    return os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)


class Lines:
    """Prints lines on stderr, "WHAT: COUNT in SECONDS s", about work of more than a few seconds."""

    def __init__(self, what: str, advice: str = "") -> None:
        self._what, self._advice = what, advice
        self._begun, self._due = time.monotonic(), 0.2 * SECONDS_BETWEEN_LINES

    def show(self, count: int) -> None:
        """Prints a line with `count` if the last line is old enough."""
        seconds = time.monotonic() - self._begun
        if seconds < self._due or sys.stderr is None:
            return
        with suppress(OSError):
            text = f"{self._what}: {count:,} in {seconds:.0f} s{self._advice}"
            print(printable(text), file=sys.stderr, flush=True)
        self._due, self._advice = seconds + SECONDS_BETWEEN_LINES, ""
