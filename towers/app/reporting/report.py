"""Shows a run's lines on a terminal or in a pipe, and writes them to log.txt."""

import io
import math
import os
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live

from towers.app.command_line import as_flags, train_command
from towers.app.config import TrainConfig
from towers.app.continued import named_modules
from towers.app.reporting.time_spent import TimeSpent
from towers.app.training.build import Run
from towers.app.training.task import is_python
from towers.machine import files, hang, places
from towers.machine.devices import placement
from towers.machine.user_lines import TowersWarning
from towers.machine.words import counted, printable
from towers.resume.checkpointer import Found
from towers.app.run_dir import BEST, FINAL
from towers.resume.epoch import num_steps
from towers.app.monitor import Monitor
from towers.resume.train_state import TrainState
from towers.step.digests import digest
from towers.workers.cluster import Cluster

_SECONDS_BETWEEN_REFRESHES = 0.5  # each refresh reads the loss back from the device
_SECONDS_BETWEEN_LINES = 10.0


class Report:
    """Writes colored lines to a terminal or plain lines to a pipe, and all lines to log.txt.

    A terminal also has one line that is updated in place. If stdout is closed or the disk is full,
    the run continues.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout  # None if stdout is closed
        self._prefix = places.prefix(places.here())
        self.log: Path | None = None  # the file to which later lines are appended as well
        self._live: Live | None = None  # the line that is updated on a terminal
        self._console: Console | None = None
        if isinstance(self._stream, io.TextIOWrapper):  # a name may hold what it cannot encode
            with self._stream_may_end():  # as this call flushes it
                self._stream.reconfigure(errors="backslashreplace")
        if self._stream is not None and self._stream.isatty():
            console = Console(
                file=self._stream, highlight=False, markup=False, emoji=False, soft_wrap=True
            )
            if console.is_terminal and not console.is_dumb_terminal:
                self._console = console
        self._shown_at = time.monotonic()

    def line(self, text: str) -> None:
        """Shows one line, with paths relative to the directory in which the report was made.

        On a terminal, it stands above the updated line.
        """
        text = printable(self._prefix.sub("", text))
        with self._stream_may_end():
            if self._console is not None:
                self._console.print(text, style="yellow" if text.startswith("Warning") else None)
            elif self._stream is not None:
                print(text, file=self._stream, flush=True)
        try:
            if self.log is not None:
                with files.open_to_append(self.log) as file:
                    file.write(f"{text.rstrip()}\n".encode(errors="backslashreplace"))
        except OSError as error:
            path, self.log = self.log, None
            self.warn(f"{path} cannot be written any more ({error.strerror}); training continues.")

    def warn(self, message: str) -> None:
        """Shows a warning."""
        self.line(labelled("Warning", message))

    @contextmanager
    def show_warnings(self) -> Iterator[None]:
        """Shows towers' warnings as lines within the context; leaves libraries' warnings alone."""
        before = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, *rest: Any
        ) -> None:
            if issubclass(category, TowersWarning):
                self.warn(as_flags(str(message)))
            else:
                before(message, category, filename, *rest)

        with warnings.catch_warnings():
            warnings.showwarning = show  # type: ignore[assignment]  # takes the rest by position
            yield

    def is_due(self) -> bool:
        """Returns whether it is time to call `ongoing` again; this call is cheap."""
        pause = _SECONDS_BETWEEN_REFRESHES
        if self._console is None:
            pause = _SECONDS_BETWEEN_LINES
        return time.monotonic() - self._shown_at >= pause

    def ongoing(self, line: str) -> None:
        """Shows progress in the line that is updated in place; a pipe gets one more line."""
        self._shown_at, line = time.monotonic(), printable(line)
        if self._console is not None:
            with self._stream_may_end():
                if self._live is None:
                    self._live = Live(console=self._console, auto_refresh=False, transient=True)
                    self._live.start()
                text = self._console.render_str(line)
                text.overflow = "crop"
                self._live.update(text, refresh=True)
        else:
            self.line(line)

    def waiting(self, what: str) -> None:
        """Shows in the updated line that the run waits for `what`; the next `ongoing` is due."""
        if self._console is not None:
            self.ongoing(f"{what} ...")
            self._shown_at = -math.inf

    def close(self) -> None:
        """Removes the updated line from a terminal, and restores the terminal's state."""
        self._shown_at = time.monotonic()
        live, self._live = self._live, None
        if live is not None:
            with self._stream_may_end():
                live.stop()

    @contextmanager
    def _stream_may_end(self) -> Iterator[None]:
        """Stops the output, but not the run, if the pipe breaks or the stream is closed.

        If the user pauses the output, with Ctrl-S or in a pager, the run waits without a timeout.
        """
        try:
            with hang.within("writing to the terminal", is_patient=True):
                yield
        except (OSError, ValueError):
            if self._stream is sys.stdout:  # Python would fail when it flushes its buffer at exit
                sys.stdout = open(os.devnull, "w", encoding="utf-8")
            self._stream = self._console = self._live = None


def report_of(cluster: Cluster, others: str) -> Report:
    """Returns the chief's report on the terminal; `others` says where another worker's lines go."""
    if cluster.is_chief:
        return Report()
    print(
        f"worker {cluster.index} of {cluster.num_workers}, at {cluster.addresses[cluster.index]}: "
        f"{others}",
        flush=True,
    )
    return Report(open(os.devnull, "w", encoding="utf-8"))


def labelled(label: str, text: str) -> str:
    """Returns a line that begins with a label, such as "Batch     128 global"."""
    return f"{label:<10}{text}"


def devices_line(
    parameter_device: str,
    tower_devices: Sequence[str],
    first: int = 0,
    num_copies: int = 0,
    stages: int = 1,
) -> str:
    """Returns the line with the parameters' device, their copies, and each tower's device.

    The towers count from `first` on. With stages, it names the device of stage 0.
    """
    text = f"parameters on {parameter_device}"
    if num_copies == 1:
        text += " and 1 copy"
    elif num_copies > 1:
        text += f" and {num_copies} copies"
    text += f"; {placement(tower_devices, first)}"
    if stages > 1:
        text += f"; each in {stages} stages, on as many devices"
    return labelled("Devices", text)


def slowest_line(seconds: Mapping[str, float], tower_devices: Sequence[str]) -> str:
    """Returns the line that names the slowest device, if devices differ by more than 5%.

    seconds: the time of one tower on each device.
    """
    ends = {device: n * seconds[device] for device, n in Counter(tower_devices).items()}
    fastest, slowest = (best(seconds, key=lambda d: seconds[d]) for best in (min, max))
    last = max(ends, key=lambda device: ends[device])
    text = f"none: a tower takes {seconds[slowest]:.3g} s, and devices differ by at most 5%"
    if seconds[slowest] > 1.05 * seconds[fastest]:
        text = f"{slowest}, {seconds[slowest]:.3g} s a tower; fastest: {fastest}, "
        text += f"{seconds[fastest]:.3g} s. {last} ends last, after {ends[last]:.3g} s"
    return labelled("Slowest", text)


def format_seconds(seconds: float) -> str:
    """Formats seconds: 41.2 -> "0:41", 3723 -> "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def format_values(values: Mapping[str, float]) -> str:
    """Returns "loss 0.0812  accuracy 0.976"; accuracies have three decimals."""
    texts = []
    for name, value in values.items():
        shown = f"{value:.3f}" if "accuracy" in name else format_loss(value)
        texts.append(f"{name} {shown}")
    return "  ".join(texts)


def format_loss(loss: float) -> str:
    """Formats a loss with four decimals, or as 1.234e-05 if it is very small or very large."""
    if loss == 0 or 1e-3 <= abs(loss) < 1e5:
        return f"{loss:.4f}"
    return f"{loss:.3e}"


def describe_resumed(found: Found | None, train_state: TrainState, out: Report) -> None:
    """Prints the checkpoint that a run resumes from; `found` is None without a checkpoint."""
    if found is None:
        out.line(labelled("Resume", "no checkpoint yet: from step 0"))
        return
    for what in found.damaged:
        out.warn(f"{what}; an older one takes its place.")
    out.line(labelled("Resume", f"from step {train_state.step:,}: {found.path}"))


def describe_complete(run: Run, train_state: TrainState, out: Report) -> None:
    """Prints that the run is already complete, and its best epoch."""
    done = amount(train_state.step, run.steps_an_epoch)
    if train_state.is_stopped(run.config.early_stopping):
        done += ", stopped early"
    out.line(f"Already complete: {done}, {_best_value(train_state.history, run.monitor)}")


def describe_end(
    run: Run, train_state: TrainState, spent: TimeSpent, out: Report, *, has_final: bool = True
) -> None:
    """Prints which model files hold which weights, where the time went, and the best value."""
    column, saved = run.monitor.column, train_state.best_saved
    is_best = saved == train_state.best_step  # False: a better epoch's file could not be written
    done = amount(train_state.step, run.steps_an_epoch)
    files = f"{FINAL} is not written"
    if has_final:
        files = f"{FINAL} holds the weights after {done}"
    if saved is not None:
        files += f", {BEST} holds the weights of epoch {num_steps(saved, run.steps_an_epoch)}"
        if is_best:
            files += f", the best by {column}"
    out.line(labelled("Time", time_words(spent, run.config.price)))
    out.line(labelled("Models", files))
    verb = "Done" if has_final and is_best else "Trained"
    best = _best_value(run.step.model.history.history, run.monitor)
    text = f"{verb}: {done} in {format_seconds(spent.total)}, {best}"
    skipped = num_skipped(run, train_state)
    if skipped > 0:
        text += f"; {skipped:,} of {train_state.step:,} updates left out"
    out.line(f"{text}; weights {digest(run.step.model)}")


def time_words(spent: TimeSpent, price: float | None) -> str:
    """Returns "3:06 in 2 starts: steps 2:30 (81%), ..." with the parts of at least 0.5%."""
    total = spent.total
    parts = [
        f"{part} {format_seconds(seconds)} ({seconds / total:.0%})"
        for part, seconds in sorted(spent.seconds.items(), key=lambda pair: -pair[1])
        if seconds >= 0.005 * total
    ]
    text = format_seconds(total)
    if spent.num_starts > 1:
        text += f" in {counted(spent.num_starts, 'start')}"
    return f"{text}: {', '.join(parts)}{cost(total, price)}"


def cost(seconds: float, price: float | None) -> str:
    """Returns "; 1.05 at 2.10 an hour", or "" without a price."""
    if price is None:
        return ""
    return f"; {seconds / 3600 * price:.2f} at {price:.2f} an hour"


def num_skipped(run: Run, train_state: TrainState) -> int:
    """Returns the number of updates that were left out, which the optimizer did not count."""
    return train_state.step - (int(run.step.optimizer.iterations) - run.first_iteration)


def resume_words(config: TrainConfig, directory: Path | str, **changed: str) -> str:
    """Returns the command that continues a run: "python train.py --resume=runs/cnn-mnist-001"."""
    given: dict[str, Any] = {"resume": str(directory), **changed}
    if named_modules(config):
        given["trust_run_dir"] = True
    if is_python(config):  # its model or data are objects of a script
        values = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"the same script, with towers.TrainConfig({values})"
    words = [train_command()]
    for name, value in given.items():
        words.append(f"--{name}" if value is True else f"--{name}={shlex.quote(value)}")
    return " ".join(words)


def amount(step: int, steps_an_epoch: int) -> str:
    """Returns "12 epochs", or "1,500 steps" if the last epoch is not complete."""
    epochs, rest = divmod(step, steps_an_epoch)
    if rest == 0:
        return counted(epochs, "epoch")
    return counted(step, "step")


def _best_value(history: Mapping[str, Sequence[float]], monitor: Monitor) -> str:
    """Returns "best val_accuracy 0.9926 (epoch 9)" for the values of all epochs, by column."""
    column = monitor.column
    if not history.get(column):
        return "no epoch is complete"
    index = monitor.best_index(history)
    if index is None:
        return f"no finite {column}"
    return f"best {column} {format_loss(history[column][index])} (epoch {index + 1})"
