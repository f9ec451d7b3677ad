"""Keeps libraries' messages off the terminal: what they write to stderr goes to log.txt.

TensorFlow's C++ writes to file descriptor 2 as soon as it is imported, before there is a run
directory: until then a temporary file holds it. Python's own sys.stderr keeps the terminal, for
error messages and for the prints of a user's own model.
"""

import faulthandler
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_STDERR = 2


class CapturedStderr:
    """Libraries' output on stderr, captured in a file.

    path: the file that has it; None until `move_to`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.path: Path | None = None

    def move_to(self, path: Path) -> None:
        """Appends it to a file, now and from now on.

        Raises:
            OSError: the file cannot be written.
        """
        with path.open("ab") as log:
            os.dup2(log.fileno(), _STDERR)
            self._file.seek(0)
            shutil.copyfileobj(self._file, log)
        self.path = path


@contextmanager
def quiet_stderr() -> Iterator[CapturedStderr]:
    """Holds libraries' messages back; what nobody has moved to a file is dropped at the end.

    Enter it before TensorFlow is imported. Python's logging and warnings are messages, too.
    """
    python_stderr = sys.stderr
    with tempfile.TemporaryFile() as buffer, _copy_of_stderr() as terminal:
        sys.stderr = os.fdopen(terminal, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.dup2(buffer.fileno(), _STDERR)
        # A crash in C++ leaves Python no time to explain itself: this says at least where.
        faulthandler.enable(sys.stderr)
        with _logging_to_stderr():
            try:
                yield CapturedStderr(buffer)
            finally:
                faulthandler.disable()
                sys.stderr.flush()
                sys.stderr = python_stderr
                os.dup2(terminal, _STDERR)


@contextmanager
def _copy_of_stderr() -> Iterator[int]:
    """A second descriptor for what stderr is now: the terminal; nothing where it was closed."""
    try:
        copy = os.dup(_STDERR)
    except OSError:
        copy = os.open(os.devnull, os.O_WRONLY)
    try:
        yield copy
    finally:
        os.close(copy)


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Sends Python's logging and warnings to descriptor 2, wherever it leads at the time.

    With a handler on the root logger, TensorFlow and absl install none of their own.
    """
    stream = os.fdopen(_STDERR, "w", buffering=1, errors="backslashreplace", closefd=False)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(handler)
