"""Lines on how far a run came: where it goes on, its best epoch, its end."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from towers.resume.best import Monitor
from towers.resume.run_dir import BEST, FINAL
from towers.resume.train_state import TrainState
from towers.app.command_line import train_command
from towers.resume.source import num_steps
from towers.machine.words import counted
from towers.app.reporting.formats import format_loss, format_seconds
from towers.app.reporting.report import Report, labelled
from towers.app.training.build import Run
from towers.app.training.loaded import Loaded


def describe_resumed(loaded: Loaded | None, out: Report) -> None:
    """Says what a run goes on from; None: from its beginning."""
    if loaded is None:
        out.line(resumed_line(None, 0))
        return
    for what in loaded.damaged:
        out.warn(f"{what}; an older one takes its place.")
    out.line(resumed_line(loaded.path, loaded.train_state.step))


def describe_complete(run: Run, train_state: TrainState, out: Report) -> None:
    """Says that there is nothing to go on with."""
    done = amount(train_state.step, run.steps_an_epoch)
    best = best_value(train_state.history.get(run.monitor.column, []), run.monitor)
    out.line(complete_line(done, train_state.is_stopped(run.config.early_stopping), best))


def describe_end(
    run: Run, train_state: TrainState, seconds: float, out: Report, *, has_final: bool = True
) -> None:
    """Says which files hold which weights, and how good the best ones are.

    Args:
        run: what was trained.
        train_state: where it has ended.
        seconds: how long this process has trained.
        out: where the lines go.
        has_final: whether final.keras is written.
    """
    monitor, saved = run.monitor, train_state.best_saved
    best_epoch = None if saved is None else num_steps(saved, run.steps_an_epoch)
    is_best = saved == train_state.best.step
    done = amount(train_state.step, run.steps_an_epoch)
    best = best_value(run.step.model.history.history.get(monitor.column, []), monitor)
    out.line(models_line(done if has_final else None, best_epoch, monitor.column, is_best))
    line = done_line(done, seconds, best, num_skipped(run, train_state), train_state.step)
    out.line(line if has_final and is_best else line.replace("Done", "Trained", 1))


def num_skipped(run: Run, train_state: TrainState) -> int:
    """The updates that were left out: the optimizer has not counted them."""
    return train_state.step - (int(run.step.optimizer.iterations) - run.first_iteration)


# The lines, each from plain values


def resumed_line(path: Path | None, step: int) -> Text:
    """"Resume    from step 1,502: runs/cnn-mnist-001/checkpoints/epoch-3-step-1502".

    Args:
        path: of the checkpoint; None where there is none yet.
        step: the updates that it holds.
    """
    if path is None:
        return labelled("Resume", "no checkpoint yet: from step 0")
    return labelled("Resume", f"from step {step:,}: {path}")


def resume_words(
    directory: Path | str, is_python: bool = False, nonfinite: str | None = None
) -> str:
    """The words that continue a run: "python train.py --resume=runs/cnn-mnist-001".

    Args:
        directory: of the run.
        is_python: its model or data are objects of a script, which train.py does not have.
        nonfinite: the field of the configuration, where it changes.
    """
    if is_python:
        given = f"resume={str(directory)!r}" + (f", nonfinite={nonfinite!r}" if nonfinite else "")
        return f"the same script, with towers.TrainConfig({given})"
    name = shlex.quote(str(directory))
    if nonfinite:
        return f"{train_command()} --resume={name} --nonfinite={nonfinite}"
    return f"{train_command()} --resume={name}"


def stopped_line(directory: Path | str, step: int, is_saved: bool, is_python: bool = False) -> Text:
    """"saved at step 1502. Resume: python train.py --resume=runs/cnn-mnist-001".

    Args:
        directory: of the run.
        step: of the newest checkpoint.
        is_saved: whether the run stands there.
        is_python: see `resume_words`.
    """
    what = "saved at" if is_saved else "the last checkpoint is that of"
    text = f"{what} step {step}. Resume: {resume_words(directory, is_python)}"
    return Text(text, no_wrap=True)  # a command that is broken would be another one


def skipped_warning(count: int, loss_scale: float | None) -> str:
    """A warning of the updates that an epoch has left out, and why.

    Args:
        count: of the updates, at least 1.
        loss_scale: now; None where there is none.
    """
    why = "a NaN or infinite loss or gradient"
    if loss_scale is not None:
        why += f"; the loss scale is {loss_scale:,.0f} now"
    return f"{counted(count, 'update')} left out in this epoch: {why}."


def nonfinite_error(reason: str, step: int, directory: Path | str, is_python: bool = False) -> str:
    """The error of a NaN or infinite loss or gradient, with the ways out.

    Args:
        reason: a sentence that names it.
        step: the update that was not made, from 1.
        directory: of the run.
        is_python: see `resume_words`.
    """
    return (
        f"step {step:,}: {reason} The update was not made. Lower `learning_rate`, or leave out "
        f"such updates: {resume_words(directory, is_python, 'skip')}."
    )


def unsaved_error(reason: str, directory: Path | str, is_python: bool = False) -> str:
    """Returns the error for a model that is not in its file: `reason`, and how to continue."""
    return f"{reason} Make room, then continue the run: {resume_words(directory, is_python)}."


def amount(step: int, steps_an_epoch: int) -> str:
    """"12 epochs", or "1,500 steps" where the last epoch is not complete."""
    epochs, rest = divmod(step, steps_an_epoch)
    return counted(epochs, "epoch") if rest == 0 else counted(step, "step")


def best_value(values: Sequence[float], monitor: Monitor) -> str:
    """"best val_accuracy 0.9926 (epoch 9)".

    Args:
        values: the monitored value of each epoch.
        monitor: its column, and which value is the best.
    """
    index = monitor.best_index(values)
    if index is not None:
        value = values[index]
        shown = f"{value:.4f}" if "accuracy" in monitor.column else format_loss(value)
        return f"best {monitor.column} {shown} (epoch {index + 1})"
    return f"no finite {monitor.column}" if len(values) > 0 else "no epoch is complete"


def complete_line(done: str, is_stopped: bool, best: str) -> str:
    """"Already complete: 12 epochs, stopped early, best val_accuracy 0.9926 (epoch 9)".

    Args:
        done: the `amount` that is done. best: the `best_value`.
        is_stopped: whether the run has ended before its last step.
    """
    early = ", stopped early" if is_stopped else ""
    return f"Already complete: {done}{early}, {best}"


def models_line(
    done: str | None, best_epoch: int | None, monitor: str, is_best: bool = True
) -> Text:
    """Which weights are in which file: the last ones are never replaced by the best ones.

    Args:
        done: the `amount` after which final.keras was written; None: it could not be written.
        best_epoch: whose weights best.keras holds, from 1; None: there is no such file.
        monitor: the column by which an epoch is the best.
        is_best: whether that epoch is the best one; else a better one could not be written.
    """
    files = f"{FINAL} is not written" if done is None else f"{FINAL} holds the weights after {done}"
    if best_epoch is not None:
        held = "holds the weights" if done is None else "those"
        best = f", the best by {monitor}" if is_best else ""
        files += f", {BEST} {held} of epoch {best_epoch}{best}"
    return labelled("Models", files)


def done_line(done: str, seconds: float, best: str, num_skipped: int, num_steps: int) -> str:
    """"Done: 12 epochs in 3:06, best val_accuracy 0.9926 (epoch 9)".

    Args:
        done: the `amount` that is done. best: the `best_value`.
        seconds: how long this process has trained.
        num_skipped: updates that were left out, of `num_steps`.
    """
    skipped = f"; {num_skipped:,} of {num_steps:,} updates left out" if num_skipped > 0 else ""
    return f"Done: {done} in {format_seconds(seconds)}, {best}{skipped}"
