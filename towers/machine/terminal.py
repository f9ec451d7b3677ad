"""Keeps libraries' messages off the terminal: their stderr output goes to log.txt.

TensorFlow's C++ code writes to file descriptor 2 when it is imported, before there is a run
directory; until then, a temporary file holds the output. Python's sys.stderr keeps the terminal,
for error messages and for prints in the user's code.
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
    """Captures the stderr output of libraries in a file.

    path: the file that holds the output; None until `move_to`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.path: Path | None = None

    def move_to(self, path: Path) -> None:
        """Appends the output so far, and all further output, to a file.

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
    """Holds libraries' messages back; drops them at the end, unless they are moved to a file.

    Enter it before TensorFlow is imported. Messages include Python's logging and warnings.
    """
    python_stderr = sys.stderr
    try:
        terminal = os.dup(_STDERR)
    except OSError:  # it was closed
        terminal = os.open(os.devnull, os.O_WRONLY)
    # If the root logger has a handler, TensorFlow and absl install none.
    handler = logging.StreamHandler(_text_file(_STDERR))
    handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s: %(message)s"))
    with tempfile.TemporaryFile() as buffer:
        sys.stderr = _text_file(terminal)
        os.dup2(buffer.fileno(), _STDERR)
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
            os.dup2(terminal, _STDERR)
            os.close(terminal)


def _text_file(descriptor: int) -> TextIO:
    return os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)
