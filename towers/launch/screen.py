"""The screen of all workers: whole lines, and below them the chief's moving one."""

import os

from towers.launch.lines import without_escapes

_ERASE = b"\r\x1b[2K"  # the line that the cursor is in
_SHOW_CURSOR = b"\x1b[?25h"
_STDOUT, _STDERR = 1, 2


class Screen:
    """Where the lines go: stdout and stderr. Nobody who has stopped reading them ends a run."""

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
