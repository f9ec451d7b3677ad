"""The workers' output on one terminal: whole lines, below them the chief's moving one.

A worker's errors wait until it is known which was the first.
"""

import os
import re
from collections import deque

_ERASE = b"\r\x1b[2K"  # the line that the cursor is in
_SHOW_CURSOR = b"\x1b[?25h"
_STDOUT, _STDERR = 1, 2
_LONGEST = 1 << 16  # bytes of a line; a longer one is shown in pieces
HELD_SECONDS = 5.0  # a process that has failed ends within that time; what does not was no failure
_ERRORS = (b"error: ", b"Traceback (most recent call last):", b"Fatal Python error: ",
           b"stopped by ")
_ESCAPES = re.compile(rb"\x1b\[[\d;?]*[A-Za-z]")


class Screen:
    """Writes lines to stdout and stderr. Nobody who has stopped reading them ends a run."""

    def __init__(self, stdout: int = _STDOUT, stderr: int = _STDERR) -> None:
        """Args: file descriptors instead of the process' own."""
        self._stdout, self._stderr = _opened(stdout), _opened(stderr)
        self.is_terminal = _is_terminal(stdout)
        self._moving = b""  # the chief's line that has not ended

    def line(self, line: bytes, is_error: bool = False) -> None:
        """Shows one line, which comes without its end."""
        if self._moving:
            self._write(_ERASE)
        self._write(line + b"\n", is_error)
        if self._moving:
            self._write(self._moving)

    def draw(self, data: bytes) -> None:
        """Shows what the chief writes to a terminal: lines, and one that changes."""
        self._write(data)
        _, newline, rest = data.rpartition(b"\n")
        moving = rest if newline else self._moving + rest
        # From where it was written anew; a return at the end only announces that.
        self._moving = moving[max(0, moving.rfind(b"\r", 0, -1)):]

    def end_drawing(self) -> None:
        """Leaves the cursor in a new line and seen, also where the chief has not come to do so."""
        if without_escapes(self._moving).strip():
            self._write(b"\n")
        if self._moving:
            self._write(_SHOW_CURSOR)
            self._moving = b""

    def size(self) -> os.terminal_size:
        """The terminal's columns and rows."""
        try:
            return os.get_terminal_size(_STDOUT if self._stdout is None else self._stdout)
        except OSError:
            return os.terminal_size((80, 24))

    def _write(self, data: bytes, is_error: bool = False) -> None:
        descriptor = self._stderr if is_error else self._stdout
        try:
            while data and descriptor is not None:
                data = data[os.write(descriptor, data):]
        except OSError:  # a pipe without a reader, a closed descriptor
            if is_error:
                self._stderr = None
            else:
                self._stdout = None


def _is_terminal(descriptor: int) -> bool:
    """Whether lines can be erased there."""
    return os.isatty(descriptor) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _opened(descriptor: int) -> int | None:
    """The descriptor; None where it is closed, and what is opened next would get its number."""
    try:
        os.fstat(descriptor)
    except OSError:
        return None
    return descriptor


def without_escapes(text: bytes) -> bytes:
    """Strips a text of colours, and of all else that moves a terminal's cursor."""
    return _ESCAPES.sub(b"", text)


class Lines:
    """Cuts what comes in pieces into lines, without their ends."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """The lines that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            lines.append(self.take_rest())
        return [line.removesuffix(b"\r") for line in lines]

    def take_rest(self) -> bytes:
        """Takes the beginning of a line that has not ended."""
        rest, self._rest = self._rest, b""
        return rest


class HeldBack:
    """Lines of stderr: as soon as they look like an error, they wait for the process' end.

    Where one worker fails, the others fail after it, and their words only hide its own.
    """

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._since = 0.0

    def add(self, line: bytes, now: float) -> list[bytes]:
        """The lines to show now: this one, or none.

        Args:
            line: the next one.
            now: a time in seconds.
        """
        if not self._lines and not line.startswith(_ERRORS):
            return [line]
        if not self._lines:
            self._since = now
        self._lines.append(line)
        return []

    def overdue(self, now: float) -> list[bytes]:
        """The lines that have waited long enough for an end that does not come."""
        return self.take() if self._lines and now - self._since > HELD_SECONDS else []

    def take(self) -> list[bytes]:
        """All lines that wait; they do so no longer."""
        lines = list(self._lines)
        self._lines.clear()
        return lines
