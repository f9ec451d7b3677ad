"""Everything that a user sees of a run: on a terminal, in a pipe, in a notebook and in log.txt."""

import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.live import Live

from towers.app.training.several_workers import log_name
from towers.machine import hang, places
from towers.machine.devices import placement
from towers.workers.cluster import Cluster

_LABEL_WIDTH = 10
_SECONDS_BETWEEN_REFRESHES = 0.5  # each reads the loss back from the device
_SECONDS_BETWEEN_LINES = 10.0
_PACKAGE = str(Path(__file__).parents[2])


class _Colors(RegexHighlighter):
    """What is bold, yellow or green on a terminal: labels, warnings, the bar and the best epoch."""

    highlights = [
        r"^(?P<bold>Epoch +\d+/\d+|towers [\d.]+|\w+( x \w+)?(?=  ))",
        r"^(?P<yellow>Warning)(?=  )",
        r"(?P<green>(?<=\[)=+|\(best\)$)",
    ]


class Report:
    """Writes lines to the terminal in colour, to a pipe as plain ones, and all to log.txt.

    A terminal and a notebook's cell have one line below that moves. A stdout that nobody reads any
    more, or a full disk, does not end a run.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """Args: the stream instead of stdout."""
        self._stream = sys.stdout if stream is None else stream  # None where stdout is closed
        self._prefix = places.prefix(places.here())
        self._log: Path | None = None
        self._live: Live | None = None  # what moves on a terminal
        self._cell: Any = None  # what moves in a notebook: IPython's handle of an output
        self._is_cell = type(self._stream).__module__ == "ipykernel.iostream"
        self._console: Console | None = None
        if self._stream is not None and self._stream.isatty():
            console = Console(
                file=self._stream, highlighter=_Colors(), markup=False, emoji=False, soft_wrap=True
            )
            if console.is_terminal and not console.is_dumb_terminal:
                self._console = console
        self._shown_at = time.monotonic()

    def open_log(self, path: Path) -> None:
        """From now on lines are appended to this file as well."""
        self._log = path

    def line(self, text: str) -> None:
        """Shows one line: on a terminal above what moves, in a notebook in its place.

        Paths are shown from the directory in which the report began.
        """
        text = self._prefix.sub("", text)
        shown = self._encodable(text)
        with self._stream_may_end():
            if self._console is not None:
                self._console.print(shown)
            elif self._cell is not None:
                self._cell.update({"text/plain": shown}, raw=True)
                self._cell = None
            elif self._stream is not None:
                self._stream.write(shown + "\n")
                self._stream.flush()
        if self._log is None:
            return
        try:
            with self._log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text.rstrip() + "\n")
        except OSError as error:
            path, self._log = self._log, None
            self.warn(f"{path} cannot be written any more ({error.strerror}); training continues.")

    def warn(self, message: str) -> None:
        """Shows a warning."""
        self.line(labelled("Warning", message))

    @contextmanager
    def own_warnings(self) -> Iterator[None]:
        """Within, towers' own warnings are lines; those of libraries stay where they are."""
        before = warnings.showwarning

        def show(message: Any, category: type[Warning], filename: str, *rest: Any) -> None:
            if filename.startswith(_PACKAGE) and issubclass(category, UserWarning):
                self.warn(str(message))
            else:
                before(message, category, filename, *rest)

        with warnings.catch_warnings():
            warnings.showwarning = show  # type: ignore[assignment]  # the rest is handed on
            yield

    def is_due(self) -> bool:
        """Whether it is time to call `ongoing` again; asking is cheap."""
        moves = self._console is not None or self._is_cell
        pause = _SECONDS_BETWEEN_REFRESHES if moves else _SECONDS_BETWEEN_LINES
        return time.monotonic() - self._shown_at >= pause

    def ongoing(self, line: str, bar: str | None = None) -> None:
        """Shows how far something is: in the line that moves, in a pipe as one more line.

        A terminal shows `bar` instead, if it is given, as far as it is wide enough.
        """
        self._shown_at = time.monotonic()
        if self._console is not None:
            with self._stream_may_end():
                if self._live is None:
                    self._live = Live(console=self._console, auto_refresh=False, transient=True)
                    self._live.start()
                text = self._console.render_str(self._encodable(bar or line))
                text.overflow = "crop" if self._console.options.ascii_only else "ellipsis"
                self._live.update(text, refresh=True)
        elif self._cell is not None:
            self._cell.update({"text/plain": line}, raw=True)
        elif self._is_cell:
            from IPython.display import display

            self._cell = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self.line(line)

    def waiting(self, what: str) -> None:
        """Shows what takes a while where a line moves; what comes next is due at once."""
        if self._console is not None or self._is_cell:
            self.ongoing(f"{what} ...")
            self._shown_at = -math.inf

    def close(self) -> None:
        """Ends the line that moves on a terminal, and leaves the terminal as it was."""
        self._shown_at = time.monotonic()
        live, self._live = self._live, None
        if live is not None:
            with self._stream_may_end():
                live.stop()

    def _encodable(self, text: str) -> str:
        """The text, with escapes for what the stream cannot encode, such as a directory's name."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    @contextmanager
    def _stream_may_end(self) -> Iterator[None]:
        """A broken pipe, or a stream that was closed, ends the output alone.

        Whoever stops the output, as by Ctrl-S or in a pager, is waited for.
        """
        try:
            with hang.within("writing to the terminal", is_patient=True):
                yield
        except (OSError, ValueError):
            if self._stream is sys.stdout:  # Python would fail at its exit to flush what it holds
                sys.stdout = open(os.devnull, "w", encoding="utf-8")
            self._stream = self._console = self._live = None


def report_of(cluster: Cluster) -> Report:
    """A worker's report: the chief's on the terminal, all in a log of their own."""
    if cluster.is_chief:
        return Report()
    print(
        f"worker {cluster.index} of {cluster.num_workers}, at {cluster.addresses[cluster.index]}: "
        f"its lines go to {log_name(cluster)} in the run's directory",
        flush=True,
    )
    return Report(open(os.devnull, "w", encoding="utf-8"))


def labelled(label: str, text: str) -> str:
    """A line that begins with a label, such as "Batch     128 global"."""
    return f"{label:<{_LABEL_WIDTH}}{text}"


def devices_line(
    home: str, tower_devices: Sequence[str], first: int = 0, num_copies: int = 0, stages: int = 1
) -> str:
    """A line with the parameters' device, `home`, and the towers of each device.

    Args:
        tower_devices: of each tower from the `first` on; of its stages, the first one's.
        num_copies: of the parameters, on other devices.
    """
    copies = f" and {num_copies} {'copies' if num_copies > 1 else 'copy'}" if num_copies else ""
    each = f"; each in {stages} stages, on as many devices" if stages > 1 else ""
    towers = placement(tower_devices, first)
    return labelled("Devices", f"parameters on {home}{copies}; {towers}{each}")


def format_seconds(seconds: float) -> str:
    """41.2 -> "0:41", 3723 -> "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_values(values: Mapping[str, float]) -> str:
    """"loss 0.0812  accuracy 0.976": three decimals for a share of the examples."""
    return "  ".join(
        f"{name} {f'{value:.3f}' if 'accuracy' in name else format_loss(value)}"
        for name, value in values.items()
    )


def format_loss(loss: float) -> str:
    """Four decimals, or four digits of what they do not show."""
    return f"{loss:.4f}" if loss == 0 or 1e-3 <= abs(loss) < 1e5 else f"{loss:.3e}"
