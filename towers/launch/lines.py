"""A worker's output, line by line; its errors wait until it is known which was the first."""

import re
from collections import deque

_LONGEST = 1 << 16  # bytes of a line; a longer one is shown in pieces
_SECONDS = 5.0  # a process that has failed ends within that time; what does not was no failure
_ERRORS = (b"error: ", b"Traceback (most recent call last):", b"Fatal Python error: ",
           b"stopped by ")
_ESCAPES = re.compile(rb"\x1b\[[\d;?]*[A-Za-z]")


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
        return self.take() if self._lines and now - self._since > _SECONDS else []

    def take(self) -> list[bytes]:
        """All lines that wait; they do so no longer."""
        lines = list(self._lines)
        self._lines.clear()
        return lines
