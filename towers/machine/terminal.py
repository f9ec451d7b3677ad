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
from typing import BinaryIO, TextIO

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
    try:
        terminal = os.dup(_STDERR)
    except OSError:  # it was closed
        terminal = os.open(os.devnull, os.O_WRONLY)
    # With a handler on the root logger, TensorFlow and absl install none of their own.
    handler = logging.StreamHandler(_text_file(_STDERR))
    handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s: %(message)s"))
    with tempfile.TemporaryFile() as buffer:
        sys.stderr = _text_file(terminal)
        os.dup2(buffer.fileno(), _STDERR)
        # A crash in C++ leaves Python no time to explain itself: this says at least where.
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
            os.dup2(terminal, _STDERR)
            os.close(terminal)


def _text_file(descriptor: int) -> TextIO:
    return os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)
