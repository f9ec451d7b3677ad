"""Writes the lines about a run's progress: its start or resume, its best epoch and its end."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from towers.app.command_line import train_command
from towers.app.config import TrainConfig
from towers.app.reporting.report import Report, format_loss, format_seconds, labelled
from towers.app.training.build import Run
from towers.app.training.user_objects import is_python
from towers.machine.words import counted
from towers.resume.best import Monitor
from towers.resume.checkpointer import Found
from towers.resume.run_dir import BEST, FINAL
from towers.resume.source import num_steps
from towers.resume.train_state import TrainState


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
    early = ", stopped early" if train_state.is_stopped(run.config.early_stopping) else ""
    best = _best_value(train_state.history.get(run.monitor.column, []), run.monitor)
    out.line(f"Already complete: {done}{early}, {best}")


def describe_end(
    run: Run, train_state: TrainState, seconds: float, out: Report, *, has_final: bool = True
) -> None:
    """Prints which model files hold which weights, and the best value of the monitor.

    Args: seconds: the training time of this process. has_final: whether final.keras is written.
    """
    column, saved = run.monitor.column, train_state.best_saved
    is_best = saved == train_state.best.step  # False: a better epoch's file could not be written
    done = amount(train_state.step, run.steps_an_epoch)
    files = f"{FINAL} holds the weights after {done}" if has_final else f"{FINAL} is not written"
    if saved is not None:
        held = "those" if has_final else "holds the weights"
        files += f", {BEST} {held} of epoch {num_steps(saved, run.steps_an_epoch)}"
        files += f", the best by {column}" if is_best else ""
    out.line(labelled("Models", files))
    skipped = num_skipped(run, train_state)
    left_out = f"; {skipped:,} of {train_state.step:,} updates left out" if skipped > 0 else ""
    best = _best_value(run.step.model.history.history.get(column, []), run.monitor)
    verb = "Done" if has_final and is_best else "Trained"
    out.line(f"{verb}: {done} in {format_seconds(seconds)}, {best}{left_out}")


def num_skipped(run: Run, train_state: TrainState) -> int:
    """Returns the number of updates that were left out, which the optimizer did not count."""
    return train_state.step - (int(run.step.optimizer.iterations) - run.first_iteration)


def resume_words(config: TrainConfig, directory: Path | str, **changed: str) -> str:
    """Returns the command that continues a run: "python train.py --resume=runs/cnn-mnist-001".

    Args: changed: fields of the configuration that the command changes, with their new values.
    """
    given = {"resume": str(directory), **changed}
    if is_python(config):  # its model or data are objects of a script
        values = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"the same script, with towers.TrainConfig({values})"
    return " ".join(
        [train_command(), *(f"--{name}={shlex.quote(value)}" for name, value in given.items())]
    )


def amount(step: int, steps_an_epoch: int) -> str:
    """Returns "12 epochs", or "1,500 steps" if the last epoch is not complete."""
    epochs, rest = divmod(step, steps_an_epoch)
    return counted(epochs, "epoch") if rest == 0 else counted(step, "step")


def _best_value(values: Sequence[float], monitor: Monitor) -> str:
    """Returns "best val_accuracy 0.9926 (epoch 9)" for the monitored values of all epochs."""
    index = monitor.best_index(values)
    if index is not None:
        return f"best {monitor.column} {format_loss(values[index])} (epoch {index + 1})"
    return f"no finite {monitor.column}" if values else "no epoch is complete"
