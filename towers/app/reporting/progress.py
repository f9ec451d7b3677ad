"""Shows a run's progress: a moving bar within an epoch, then two lines for the epoch."""

import time
from typing import Any

import keras
from rich import filesize

from towers.app.reporting.report import (
    Report,
    cost,
    format_seconds,
    format_values,
    labelled,
    num_skipped,
)
from towers.app.reporting.time_spent import TimeSpent
from towers.app.training.build import Run
from towers.machine.devices import peak_memory
from towers.machine.words import counted
from towers.resume.train_state import Logs, TrainState

_FIRST_STEPS = 20  # after so many, the time to the end is shown
_SHORT = 10.0  # seconds


class Pace:
    """Times a run's steps, and estimates the time left.

    examples_per_second: the speed of this epoch's steps. The run's first step, which traces the
        graph, counts only until the second one has ended.
    num_timed: the number of steps after the first one.
    """

    def __init__(self, steps_left: int) -> None:
        self._steps_left, self.num_timed = steps_left, 0
        self._traced: float | None = None  # the time at which the run's first step ended
        self.start_epoch()

    def start_epoch(self) -> None:
        """Starts the epoch's clock; call it before the epoch's first step."""
        self._epoch_began = self._began = time.perf_counter()
        self._examples, self.examples_per_second = 0, 0.0

    def add_step(self, num_examples: int) -> None:
        """Counts a step of `num_examples` examples that has just ended."""
        now = time.perf_counter()
        self._steps_left -= 1
        self._examples += num_examples
        self.examples_per_second = self._examples / max(now - self._began, 1e-9)
        if self._traced is None:
            self._traced = self._began = now
            self._examples = 0
        else:
            self.num_timed += 1

    @property
    def epoch_seconds(self) -> float:
        """Returns the seconds since this epoch began."""
        return time.perf_counter() - self._epoch_began

    @property
    def seconds_left(self) -> float | None:
        """Returns an estimate for the rest of the run; None before two steps and after the end.

        The mean time of a step includes its share of the validations so far.
        """
        if self._traced is None or not self.num_timed or not self._steps_left:
            return None
        return self._steps_left * (time.perf_counter() - self._traced) / self.num_timed


class ProgressLines(keras.callbacks.Callback):
    """Shows the run's progress; the training loop calls the methods of `pace` and `spent`."""

    def __init__(self, out: Report, run: Run, train_state: TrainState, spent: TimeSpent) -> None:
        super().__init__()
        self.spent = spent
        self._out, self._run, self._train_state = out, run, train_state
        self.pace = Pace(run.num_steps - train_state.step)
        self._skipped_before = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._out.waiting(f"{self._label(self._train_state.epoch)}  preparing the first step")

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._skipped_before = num_skipped(self._run, self._train_state)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self.pace.num_timed == _FIRST_STEPS:
            self._tell_the_end()
        if not self._out.is_due():  # reading the loss back from its device waits for the step
            return
        state, total = self._train_state, self._run.steps_an_epoch
        label = self._label(state.epoch)
        step = f"{state.epoch_step:>{len(f'{total:,}')},}/{total:,}"
        values = format_values({name: float(state.logs[name]) for name in self._run.metrics})
        bar = "=" * (12 * state.epoch_step // total)
        speed, left = self._speed_and_left()
        # A narrow terminal cuts off the end, so speed and memory come last.
        memory = filesize.decimal(peak_memory(self._run.step.tower_devices))
        self._out.ongoing(f"{label}  [{bar:<12}] {step}  {values}{left}{speed} | {memory}")

    def _tell_the_end(self) -> None:
        """Shows once how long the run will take, unless it is about to end."""
        left = self.pace.seconds_left
        if left is not None and left >= _SHORT:
            step = left / (self._run.num_steps - self._train_state.step)
            line = f"{step:.3g} s a step: {format_seconds(left)} to the end"
            if self._run.test is not None:
                line += ", and validation"
            self._out.line(labelled("Time", line + cost(left, self._run.config.price)))

    def end_steps(self) -> None:
        """Warns about the epoch's updates that were left out, and shows that validation runs."""
        self._out.waiting(f"{self._label(self._train_state.epoch)}  validating")
        count = num_skipped(self._run, self._train_state) - self._skipped_before
        if count > 0:
            text = f"{counted(count, 'update')} left out in this epoch: a NaN or infinite loss or "
            text += "gradient"
            scale = getattr(self._run.step.optimizer, "dynamic_scale", None)
            if scale is not None:
                text += f"; the loss scale is {float(scale):,.0f} now"
            self._out.warn(f"{text}.")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Shows the epoch's training values, its validation values and whether it is the best."""
        label = self._label(epoch)
        training = {name: logs[name] for name in self._run.columns}
        names = [f"val_{name}" for name in self._run.metrics]
        validation = {name: training.pop(name) for name in names if name in training}
        speed, left = self._speed_and_left()
        self._out.close()
        self._out.line(f"{label}  {format_values(training)}{speed}{left}")
        words = []
        if validation:
            words.append(format_values(validation))
        if self._train_state.is_best:
            words.append("(best)")
        if words:
            self._out.line("  ".join([" " * len(label), *words]))

    def _label(self, epoch: int) -> str:
        """Returns "Epoch  3/12" for epoch 2, because epochs count from 0."""
        epochs = str(self._run.config.epochs)
        return f"Epoch {epoch + 1:>{len(epochs)}}/{epochs}"

    def _speed_and_left(self) -> tuple[str, str]:
        speed, left = f" | {self.pace.examples_per_second:,.0f} examples/s", ""
        if self.pace.seconds_left is not None:
            left = f" | {format_seconds(self.pace.seconds_left)} left"
        return speed, left
