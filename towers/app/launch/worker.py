"""A worker's process: its start, what it says, its end."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
import tty
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from towers.app.launch.command import announced_directory
from towers.app.launch.screen import HeldBack, Lines, Screen
from towers.machine import parent

_PIECE = 1 << 16  # bytes of one read


class Worker:
    """One worker, which runs.

    index: in the cluster; 0 is the chief.
    code: its exit code, negative for a signal; None while it runs.
    told: whether it was asked to end: how it then ends is no failure of its own.
    killed: whether it had to be killed.
    directory: of the run, once the chief has named it.
    """

    def __init__(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], screen: Screen
    ) -> None:
        """
        Args:
            index: in the cluster.
            command: what it runs.
            environment: with its TF_CONFIG.
            screen: where its lines go.

        Raises:
            OSError: it cannot be started.
        """
        self.index = index
        self.code: int | None = None
        self.told = self.killed = False
        self.directory: str | None = None
        self._screen = screen
        self._stdout, self._stderr, self._errors = Lines(), Lines(), HeldBack()
        self._is_drawn = index == 0 and screen.is_terminal
        self._terminal: int | None = None
        self._size: os.terminal_size | None = None
        if self._is_drawn:
            output, for_worker = pty.openpty()
            tty.setraw(for_worker)  # the user's own terminal sees to the ends of lines
            self._terminal = output
            self.fit_terminal()
        else:
            output, for_worker = os.pipe()
        errors, errors_for_worker = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=for_worker,
                stderr=errors_for_worker,
                start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone
                # This process has no threads, with which a call between fork and exec were unsafe.
                preexec_fn=partial(parent.end_with, os.getpid()),
            )
        except OSError:
            os.close(output)
            os.close(errors)
            raise
        finally:
            os.close(for_worker)
            os.close(errors_for_worker)
        self.sources: dict[int, Callable[[bytes], None]] = {
            output: self._add_output, errors: self._add_errors
        }
        for descriptor in self.sources:
            os.set_blocking(descriptor, False)

    def read(self, descriptor: int) -> bool:
        """Takes what one of `sources` has now; False where nothing will come any more."""
        try:
            data = os.read(descriptor, _PIECE)
        except BlockingIOError:
            return True
        except OSError:  # a terminal whose other side is closed
            data = b""
        if data:
            self.sources[descriptor](data)
        return bool(data)

    def has_ended(self) -> bool:
        """Whether its process has."""
        if self.code is None:
            self.code = self._process.poll()
        return self.code is not None

    def close(self) -> None:
        """Takes the last that it has said, and gives back its descriptors; it has ended."""
        for descriptor in list(self.sources):
            while self._has_more(descriptor):
                pass
            os.close(descriptor)
        self.sources.clear()
        self._terminal = None
        for lines, show in ((self._stdout, self._show), (self._stderr, self._show_or_hold)):
            rest = lines.take_rest()
            if rest:
                show(rest)
        if self.code == 0:
            for line in self._errors.take():
                self._show(line, is_error=True)
        if self._is_drawn:
            self._screen.end_drawing()

    def fit_terminal(self) -> None:
        """Gives the chief's terminal the size of the user's."""
        size = self._screen.size()
        if self._terminal is not None and size != self._size:
            self._size = size
            packed = struct.pack("HHHH", size.lines, size.columns, 0, 0)
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, packed)

    def ask_to_end(self, number: int) -> None:
        """Sends a signal, once: a second would end the worker in the middle of its save."""
        if not self.told:
            self.told = True
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the worker at once, and all that it has started."""
        if self.code is None:
            self.killed = True
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ends by itself, now

    def show_overdue(self) -> None:
        """Shows what looked like an error, and has ended nothing."""
        for line in self._errors.overdue(time.monotonic()):
            self._show(line, is_error=True)

    def take_errors(self) -> list[bytes]:
        """The lines of its error that are not shown yet."""
        return self._errors.take()

    def _has_more(self, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, _PIECE)
        except OSError:  # what it has started holds the pipe open, and has nothing to say now
            return False
        if data:
            self.sources[descriptor](data)
        return bool(data)

    def _add_output(self, data: bytes) -> None:
        if self._is_drawn:
            self._screen.draw(data)
        for line in self._stdout.add(data):
            self._show(line)

    def _show(self, line: bytes, is_error: bool = False) -> None:
        if self.index != 0:
            line = b"[worker %d] %s" % (self.index, line.rpartition(b"\r")[2])
        elif not is_error:
            self.directory = announced_directory(line) or self.directory
            if self._is_drawn:
                return
        self._screen.line(line, is_error)

    def _add_errors(self, data: bytes) -> None:
        for line in self._stderr.add(data):
            self._show_or_hold(line)

    def _show_or_hold(self, line: bytes) -> None:
        for shown in self._errors.add(line, time.monotonic()):
            self._show(shown, is_error=True)
