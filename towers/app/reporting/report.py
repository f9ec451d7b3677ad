"""Everything that a user sees of a run: on a terminal, in a pipe, and in log.txt."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from towers.machine import hang, places
from towers.workers.cluster import Cluster
from towers.machine.devices import placement
from towers.machine.words import plural
from towers.app.reporting.cell_line import cell_line
from towers.app.reporting.formats import format_seconds, format_values, wrapped
from towers.step.sharding import shard_sizes
from towers.app.training.several_workers import log_name

_LABEL_WIDTH = 10
_BAR_WIDTH = 12
_SECONDS_BETWEEN_REFRESHES = 0.5  # each reads the loss back from the device
_SECONDS_BETWEEN_LINES = 10.0


class Progress(NamedTuple):
    """The progress of an epoch.

    epoch: from 1, of `epochs`. step: how many of the epoch's `num_steps` are done.
    values: {"loss": ..., metric: ...}, running means over these steps.
    seconds_left: of the whole run; None where it has ended, or nothing is timed yet.
    """

    epoch: int
    epochs: int
    step: int
    num_steps: int
    values: Mapping[str, float]
    examples_per_second: float
    seconds_left: float | None


class Report:
    """Writes lines to the terminal in colour, to a pipe or notebook as plain ones; all to log.txt.

    A stdout that nobody reads any more, or a full disk, does not end a run.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """Args: the stream instead of stdout."""
        self._stream = sys.stdout if stream is None else stream  # None where stdout is closed
        self._prefix = places.prefix(places.here())
        self._log: Path | None = None
        self._live: Live | None = None
        self._console: Console | None = None
        self._cell = cell_line(self._stream)
        if self._stream is not None and self._stream.isatty():
            self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
            if self._console.is_dumb_terminal or not self._console.is_terminal:
                self._console = None
        self._shown_at = time.monotonic()

    def open_log(self, path: Path) -> None:
        """From now on lines are appended to this file as well."""
        self._log = path

    def line(self, text: Text | str) -> None:
        """Shows one line; on a terminal, above what moves there."""
        text = self._shortened(Text(text) if isinstance(text, str) else text)
        self._show(text)
        self._write_log(text.plain)

    def warn(self, message: str) -> None:
        """Shows a warning."""
        self.line(labelled("Warning", message, style="bold yellow"))

    def is_due(self) -> bool:
        """Whether it is time to call `progress` again; asking is cheap."""
        moves = self._console or self._cell
        pause = _SECONDS_BETWEEN_REFRESHES if moves else _SECONDS_BETWEEN_LINES
        return time.monotonic() - self._shown_at >= pause

    def progress(self, progress: Progress) -> None:
        """Shows where an epoch stands: a bar that moves, or a line."""
        width = self._console.width if self._console else 0
        self.ongoing(progress_line(progress, with_steps=True), moving_line(progress, width))

    def waiting(self, what: str) -> None:
        """Shows on a terminal what takes a while, and for how long, until there is progress."""
        if self._cell is not None:
            self._cell.show(f"{what} ...")
        if self._console is None:
            return
        self._stop_live()
        began = time.monotonic()
        self._shown_at = began - _SECONDS_BETWEEN_REFRESHES  # what comes next is due at once

        def text() -> Text:
            return self._cropped(Text(f"{what} ... {format_seconds(time.monotonic() - began)}"))

        with self._stream_may_end():
            self._live = Live(
                console=self._console, get_renderable=text, refresh_per_second=2, transient=True
            )
            self._live.start()

    def ongoing(self, line: Text, text: Text) -> None:
        """Shows how far something is: `text` in place of the one before, or a `line` each time."""
        self._shown_at = time.monotonic()
        if self._cell is not None:
            self._cell.show(line.plain)
            return
        if self._console is None:
            self.line(line)
            return
        if self._live is not None and self._live.auto_refresh:  # of `waiting`
            self._stop_live()
        with self._stream_may_end():
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(self._cropped(text), refresh=True)

    def end_epoch(
        self, progress: Progress, validation: Mapping[str, float], is_best: bool
    ) -> None:
        """Shows an epoch's two lines; without validation the second only says that it is the best.

        Args:
            progress: where it has ended.
            validation: {"val_loss": ..., ...}.
            is_best: whether it is the best so far.
        """
        self._stop_live()
        self.line(progress_line(progress))
        indent = len(epoch_label(progress.epoch, progress.epochs)) + 2
        if validation or is_best:
            self.line(validation_line(validation, is_best, indent))
        self._shown_at = time.monotonic()

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self._stop_live()

    def _shortened(self, text: Text) -> Text:
        """The text, with paths from the directory in which the report began."""
        for found in reversed(list(self._prefix.finditer(text.plain))):
            text = text[:found.start()] + text[found.end():]
        return text

    def _encodable(self, text: Text) -> Text:
        """The text; what the stream cannot encode, such as a directory's name, is as in Python."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        plain = text.plain.encode(encoding, "backslashreplace").decode(encoding)
        return text if plain == text.plain else Text(plain)

    def _cropped(self, text: Text) -> Text:
        """The text as one line of the terminal."""
        text = self._encodable(text)
        text.no_wrap = True
        ascii_only = self._console is not None and self._console.options.ascii_only
        text.overflow = "crop" if ascii_only else "ellipsis"
        return text

    def _show(self, text: Text) -> None:
        text = self._encodable(text)
        with self._stream_may_end():
            if self._console:
                self._console.print(wrapped(text, self._console.width, _LABEL_WIDTH))
            elif self._stream is not None and not (self._cell and self._cell.end(text.plain)):
                self._stream.write(text.plain + "\n")
                self._stream.flush()

    @contextmanager
    def _stream_may_end(self) -> Iterator[None]:
        """A broken pipe, or a stream that was closed, ends the output alone.

        Who stops the output, as by Ctrl-S or in a pager, is waited for.
        """
        try:
            with hang.within("writing to the terminal", is_patient=True):
                yield
        except (OSError, ValueError):
            self._leave_stream()

    def _leave_stream(self) -> None:
        """Goes on without the stream; Python would fail at its exit to flush what it holds."""
        if self._stream is sys.stdout:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")
        self._stream = self._console = self._live = None

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with self._stream_may_end():
                live.stop()

    def _write_log(self, line: str) -> None:
        if self._log is None:
            return
        try:
            with self._log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line.rstrip() + "\n")
        except OSError as error:
            path, self._log = self._log, None
            self.warn(f"{path} cannot be written any more ({error.strerror}); training goes on.")


# The lines, each from plain values.


def labelled(label: str, text: str, style: str = "bold") -> Text:
    """A line that begins with a label, such as "Batch     128 global"."""
    return Text.assemble((f"{label:<{_LABEL_WIDTH}}", style), text)


def title_line(versions: dict[str, str], what: str) -> Text:
    """"towers 0.1 | TensorFlow 2.21, Keras 3.15 | run: runs/cnn-mnist-001"."""
    short = {name: ".".join(version.split(".")[:2]) for name, version in versions.items()}
    return Text.assemble(
        (f"towers {short['towers']}", "bold"),
        f" | TensorFlow {short['TensorFlow']}, Keras {short['Keras']} | {what}",
    )


def devices_line(
    home: str, tower_devices: Sequence[str], first: int = 0, num_copies: int = 0, stages: int = 1
) -> Text:
    """A line with the parameters' device, and the towers of each device.

    Args:
        home: the parameters' device.
        tower_devices: each tower's device, towers on one device side by side.
        first: the first of these towers.
        num_copies: of the parameters, on other devices.
        stages: of each tower's layers, on as many devices, of which `tower_devices` has the first.
    """
    towers = placement(tower_devices, first)
    if stages > 1:
        towers += f"; each in {stages} stages, on as many devices"
    copies = f" and {num_copies} {'copies' if num_copies > 1 else 'copy'}" if num_copies else ""
    return labelled("Devices", f"parameters on {home}{copies}; {towers}")


def workers_line(cluster: Cluster, num_towers: int) -> Text:
    """"2, this is 0, the chief; 4 towers, 2 each; over gRPC without authentication: ..."."""
    fewest, rest = divmod(num_towers, cluster.num_workers)
    each = f"{fewest}-{fewest + 1}" if rest else f"{fewest}"
    this = f"{cluster.index}{', the chief' if cluster.is_chief else ''}"
    return labelled(
        "Workers",
        f"{cluster.num_workers}, this is {this}; {num_towers} towers, {each} each; over gRPC "
        "without authentication: on private networks only",
    )


def batch_line(batch_size: int, num_towers: int, num_examples: int) -> Text:
    """"128 global = 8 towers x 16; 469 steps an epoch (last: 96 = 8 x 12)"."""
    steps, last = -(-num_examples // batch_size), num_examples % batch_size
    towers = f"{num_towers} {plural('tower', num_towers)}"
    text = f"{batch_size:,} global = {towers} x {_sizes(batch_size, num_towers)}; "
    text += f"{steps:,} {plural('step', steps)} an epoch"
    if last:
        text += f" (last: {last:,} = {num_towers} x {_sizes(last, num_towers)})"
    return labelled("Batch", text)


def split_warning(batch_size: int, num_towers: int) -> str | None:
    """A warning of an unusual split of the global batch, if it is one."""
    if batch_size < num_towers:
        return (
            f"the global batch ({batch_size:,}) is smaller than the {num_towers} towers: "
            f"{num_towers - batch_size} without an example."
        )
    if batch_size % num_towers:
        largest = max(shard_sizes(batch_size, num_towers))
        return (
            f"the global batch ({batch_size:,}) does not divide by the {num_towers} towers: every "
            f"step waits for those with {largest:,}. The result is exact all the same."
        )
    return None


def data_line(name: str, num_train: int, num_test: int | None) -> Text:
    """"mnist: 60,000 train, 10,000 test"."""
    test = "no test examples" if num_test is None else f"{num_test:,} test"
    return labelled("Data", f"{name}: {num_train:,} train, {test}")


def task_line(metrics: Sequence[str], given: Sequence[str]) -> Text:
    """"the model's own loss, metrics (loss, mae) and optimizer; learning_rate as given".

    Args:
        metrics: "loss" and the names of the metrics.
        given: what wins over what the model was compiled with.
    """
    text = f"the model's own, as it was compiled: {', '.join(metrics)}"
    if given:
        text += f"; but {' and '.join(given)} as given beside it"
    return labelled("Task", text)


def model_line(
    name: str, num_parameters: int, optimizer: str, learning_rate: float, seed: int, precision: str
) -> Text:
    """"cnn, 1,199,882 parameters; adam, learning rate 0.001; seed 0"."""
    text = f"{name}, {num_parameters:,} parameters; {optimizer}, "
    text += f"learning rate {learning_rate:.4g}; seed {seed}"
    return labelled("Model", text if precision == "float32" else f"{text}; {precision}")


def progress_line(
    progress: Progress, *, with_steps: bool = False, with_speed: bool = True
) -> Text:
    """"Epoch  3/12  step 273/469  loss 0.0812  accuracy 0.976 | 3,912 examples/s | 0:41 left"."""
    line = Text.assemble((epoch_label(progress.epoch, progress.epochs), "bold"))
    if with_steps:
        total = f"{progress.num_steps:,}"
        line.append(f"  step {progress.step:>{len(total)},}/{total}")
    line.append(f"  {format_values(progress.values)}")
    if with_speed:
        line.append(f" | {progress.examples_per_second:,.0f} examples/s")
    if progress.seconds_left is not None:
        line.append(f" | {format_seconds(progress.seconds_left)} left")
    return line


def moving_line(progress: Progress, width: int) -> Text:
    """"Epoch  3/12  [======      ]  58%  step 273/469  loss 0.0812 ..." in a terminal's width.

    Where it is too narrow the speed is left out, and then the bar.
    """
    share = f" {100 * progress.step // max(1, progress.num_steps):>3}%"
    bar = _bar(progress.step, progress.num_steps)
    line = Text()
    for with_speed, begin in ((True, bar + share), (False, bar + share), (False, Text(share))):
        line = progress_line(progress, with_steps=True, with_speed=with_speed)
        label = len(epoch_label(progress.epoch, progress.epochs))
        line = line[:label] + begin + line[label:]
        if line.cell_len < width:
            break
    return line


def validation_line(values: Mapping[str, float], is_best: bool, indent: int = 0) -> Text:
    """"val_loss 0.0460  val_accuracy 0.985  (best)"."""
    best = ("  (best)" if values else "(best)", "green")
    return Text.assemble(" " * indent, format_values(values), best if is_best else "")


def _bar(done: int, total: int) -> Text:
    filled = _BAR_WIDTH * done // max(1, total)
    return Text.assemble("  [", ("=" * filled, "green"), " " * (_BAR_WIDTH - filled) + "]")


def epoch_label(epoch: int, epochs: int) -> str:
    """"Epoch  3/12"."""
    return f"Epoch {epoch:>{len(str(epochs))}}/{epochs}"


def _sizes(num_examples: int, num_towers: int) -> str:
    sizes = shard_sizes(num_examples, num_towers)
    return f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[-1]:,}-{sizes[0]:,}"


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
