"""Shows a run's progress: a moving bar within an epoch, then two lines for the epoch."""

import time
from typing import Any

import keras

from towers.app.reporting.report import Report, format_seconds, format_values, num_skipped
from towers.app.training.build import Run
from towers.machine.words import counted
from towers.resume.source import num_steps
from towers.resume.train_state import TrainState


class Pace:
    """Times the run's remaining steps, and epochs with validation, and estimates the time left.

    examples_per_second: the speed of this epoch's steps. The run's first step, which traces the
        graph, counts only until the second one has ended.
    """

    def __init__(self, num_steps: int, num_epochs: int) -> None:
        self._steps_left, self._validations_left = num_steps, num_epochs
        self._run_began = time.perf_counter()
        self._is_traced = False
        self._step_seconds = self._validation_seconds = 0.0
        self.start_epoch()

    def start_epoch(self) -> None:
        """Starts the epoch's clock; call it before the epoch's first step."""
        self._epoch_began = self._began = self._ended = time.perf_counter()
        self._steps = self._examples = 0
        self.examples_per_second = 0.0

    def add_step(self, num_examples: int) -> None:
        """Counts a step of `num_examples` examples that has just ended."""
        self._steps_left -= 1
        self._ended = time.perf_counter()
        self._steps += 1
        self._examples += num_examples
        seconds = self._ended - self._began
        self.examples_per_second = self._examples / seconds if seconds else 0.0
        if self._is_traced:
            self._step_seconds = seconds / self._steps
        else:
            self._is_traced, self._began = True, self._ended
            self._steps = self._examples = 0

    def end_epoch(self) -> None:
        """Stops the clock of the epoch's validation; call it when validation has ended."""
        self._validations_left -= 1
        self._validation_seconds = time.perf_counter() - self._ended

    @property
    def epoch_seconds(self) -> float:
        """Returns the seconds since this epoch began."""
        return time.perf_counter() - self._epoch_began

    @property
    def run_seconds(self) -> float:
        """Returns the seconds since this process began to train."""
        return time.perf_counter() - self._run_began

    @property
    def seconds_left(self) -> float | None:
        """Returns an estimate for the rest of the run; None before two steps and after the end."""
        steps = self._steps_left * self._step_seconds
        rest = steps + self._validations_left * self._validation_seconds
        return rest if self._step_seconds and self._validations_left else None


class ProgressLines(keras.callbacks.Callback):
    """Shows the run's progress; the training loop calls the methods of `pace`."""

    def __init__(self, out: Report, run: Run, train_state: TrainState) -> None:
        super().__init__()
        self._out, self._run, self._train_state = out, run, train_state
        num_epochs = num_steps(run.num_steps, run.steps_an_epoch)
        self.pace = Pace(run.num_steps - train_state.step, num_epochs - train_state.epoch)
        self._skipped_before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._out.waiting(f"{self._label(self._train_state.epoch)}  preparing the first step")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._skipped_before = num_skipped(self._run, self._train_state)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._out.is_due():  # reading the loss back from its device waits for the step
            return
        state, total = self._train_state, self._run.steps_an_epoch
        label = self._label(state.epoch)
        step = f"{state.epoch_step:>{len(f'{total:,}')},}/{total:,}"
        values = format_values({name: float(state.logs[name]) for name in self._run.metrics})
        bar = "=" * (12 * state.epoch_step // total)
        speed, left = self._speed_and_left()
        self._out.ongoing(
            f"{label}  step {step}  {values}{speed}{left}",
            # A narrow terminal cuts off the end, so the speed comes last here.
            f"{label}  [{bar:<12}] {step}  {values}{left}{speed}",
        )

    def end_steps(self) -> None:
        """Warns about the epoch's updates that were left out, and shows that validation runs."""
        self._out.waiting(f"{self._label(self._train_state.epoch)}  validating")
        count = num_skipped(self._run, self._train_state) - self._skipped_before
        if count > 0:
            scale = getattr(self._run.step.optimizer, "dynamic_scale", None)
            now = "" if scale is None else f"; the loss scale is {float(scale):,.0f} now"
            updates = f"{counted(count, 'update')} left out in this epoch"
            self._out.warn(f"{updates}: a NaN or infinite loss or gradient{now}.")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Shows the epoch's training values, its validation values and whether it is the best."""
        label, metrics = self._label(epoch), self._run.metrics
        training = format_values({name: logs[name] for name in metrics})
        columns = [name for name in self._run.columns if name not in metrics]
        validation = format_values({name: logs[name] for name in columns})
        best = "(best)" if self._train_state.is_best else ""
        self._out.close()
        self._out.line(f"{label}  {training}{''.join(self._speed_and_left())}")
        if validation or best:
            self._out.line("  ".join(filter(None, [" " * len(label), validation, best])))

    def _label(self, epoch: int) -> str:
        """Returns "Epoch  3/12" for epoch 2, because epochs count from 0."""
        epochs = str(self._run.config.epochs)
        return f"Epoch {epoch + 1:>{len(epochs)}}/{epochs}"

    def _speed_and_left(self) -> tuple[str, str]:
        left = self.pace.seconds_left
        return (
            f" | {self.pace.examples_per_second:,.0f} examples/s",
            "" if left is None else f" | {format_seconds(left)} left",
        )
