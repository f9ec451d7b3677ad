"""train(config): epochs of steps, each with its validation; and the run directory they leave."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers import environment, report, run_dir, signals, tensorboard
from towers.anatomy_report import show_anatomy
from towers.build import Run, build
from towers.config import TrainConfig
from towers.curves import draw_or_warn
from towers.describe import describe, show_plan, verify
from towers.input import num_steps, ordered_batches, shuffled_batches
from towers.memory import out_of_memory_explained
from towers.nonfinite import NonFiniteError
from towers.pace import Pace
from towers.prefetch import Batch, prefetched
from towers.report import Progress, Report
from towers.resume import continued_config, given_fields
from towers.saver import Saver
from towers.snapshot import Position
from towers.terminal import Noise


class _Session(NamedTuple):
    """What the parts of one training share.

    directory: of the run. steps: after which it ends. callbacks: the user's.
    pending: the signal that waits for the end of a step. board: TensorBoard's log, if any.
    """

    run: Run
    directory: Path
    out: Report
    callbacks: Sequence[keras.callbacks.Callback]
    saver: Saver
    steps: int
    pace: Pace
    pending: signals.Pending
    board: tensorboard.TensorBoardLog | None


def train(
    config: TrainConfig,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    *,
    noise: Noise | None = None,
) -> dict[str, list[float]]:
    """Trains a model, and leaves a run directory (see `run_dir`).

    Args:
        config: the run.
        callbacks: Keras callbacks; `model.stop_training` ends the run.
        noise: what is held back of libraries' messages until there is a log.txt.

    Returns:
        Keras' History.history: {"loss": [one an epoch], "val_accuracy": ...}.

    Raises:
        ValueError: the configuration does not fit the machine, the data, or the files there are.
    """
    environment.check()
    if config.tensorboard:
        tensorboard.check_installed()
    if config.resume is not None and config.run_dir is None:
        config = continued_config(config.resume, given_fields(config))
    if config.resume is None:
        run_dir.check(config.run_dir)
    with _dtype_policy(config.precision), closing(Report()) as out:
        run = build(config)
        if config.plan:
            describe(run, out, "plan")
            show_plan(run, out)
            return {}
        directory = _directory(run.config)
        with (
            run_dir.locked(directory),
            out_of_memory_explained(run, directory / run_dir.LOG),
            closing(Saver(run, directory, out, callbacks)) as saver,
        ):
            if config.resume is not None:
                saver.load()
            out.open_log(directory / run_dir.LOG)
            if noise is not None:
                with suppress(OSError):  # the report warns of it, at its next line
                    noise.move_to(directory / run_dir.LOG)
            describe(run, out, f"run: {directory}")
            if config.resume is not None:
                saver.describe()
            if config.profile:
                show_anatomy(run, directory / run_dir.PROFILE, out)
                return {}
            if config.verify_gradients:
                verify(run, out)
            if config.epochs == 0:
                return _evaluate_only(run, out)
            return _train_and_save(run, directory, out, callbacks, saver)


def _directory(config: TrainConfig) -> Path:
    """The run's directory: a new one, or the one to go on in."""
    if config.resume is not None:
        return Path(config.resume)
    return run_dir.create(config.run_dir, f"{config.model}-{config.dataset}", config.to_json())


def _train_and_save(
    run: Run,
    directory: Path,
    out: Report,
    callbacks: Sequence[keras.callbacks.Callback],
    saver: Saver,
) -> dict[str, list[float]]:
    """All epochs that are left; then final.keras."""
    steps = run.config.epochs * run.steps_an_epoch
    if run.config.max_steps is not None:
        steps = min(steps, run.config.max_steps)
    position, monitor = saver.position, run.config.monitor
    if saver.is_complete(steps):
        done = _done(position, run) + ", stopped early" * saver.is_stopped
        out.line(f"Already complete: {done}, {_best(position.history, monitor)}")
        return position.history
    pace = Pace(steps - position.step, num_steps(steps, run.steps_an_epoch) - position.epoch)
    with signals.deferred() as pending:
        try:
            board = _open_board(run, directory, out)
            _train_epochs(
                _Session(run, directory, out, callbacks, saver, steps, pace, pending, board)
            )
        except BaseException:
            saver.stop()
            raise
        finally:
            title = f"{run.config.model} on {run.config.dataset}"
            draw_or_warn(directory, position.results, title, monitor, out.warn)
    if _save(run.step.model, directory / run_dir.FINAL, out):
        saver.finish()
    history = run.step.model.history.history
    seconds = report.format_seconds(pace.run_seconds)
    _describe_models(position, run, out)
    done = f"{_done(position, run)} in {seconds}, {_best(history, monitor)}"
    out.line(f"Done: {done}{_skipped(run, position)}")
    return history


def _open_board(run: Run, directory: Path, out: Report) -> tensorboard.TensorBoardLog | None:
    """The log of --tensorboard; None without the flag."""
    if not run.config.tensorboard:
        return None
    return tensorboard.TensorBoardLog(
        directory / tensorboard.FOLDER, run.step, out.warn, run.config.histograms
    )


def _train_epochs(session: _Session) -> None:
    """Epochs until the steps are done, or a callback sets model.stop_training."""
    run, saver = session.run, session.saver
    model, position = run.step.model, saver.position
    model.stop_training = False
    hooks = keras.callbacks.CallbackList(
        list(session.callbacks),
        add_history=True,
        model=model,
        epochs=run.config.epochs,
        steps=run.steps_an_epoch,
        verbose=0,
    )
    logs: dict[str, float] = {}
    hooks.on_train_begin()
    if position.epoch_step:
        hooks.on_epoch_begin(position.epoch)  # before the state that it had led to
    saver.begin()
    while position.epoch_step or position.step < session.steps and not model.stop_training:
        if not position.epoch_step:
            hooks.on_epoch_begin(position.epoch)
        logs = _train_and_validate(session, hooks)
        hooks.on_epoch_end(position.epoch - 1, logs)
        saver.end_callbacks()
        saver.save_epoch()
        session.pending.check()
    saver.save()
    hooks.on_train_end(logs)


def _train_and_validate(
    session: _Session, hooks: keras.callbacks.CallbackList
) -> dict[str, float]:
    """One epoch, or what is left of it, and the files that it leaves; returns its logs."""
    run, out, saver, pace = session.run, session.out, session.saver, session.pace
    position = saver.position
    epoch = position.epoch
    skipped = _num_skipped(run, position)
    pace.start_epoch()
    logs = _train_epoch(session, hooks)
    _warn_skipped(run, out, _num_skipped(run, position) - skipped)
    progress = _progress(run, epoch, position.epoch_step, logs, pace)
    saver.begin_validation(is_partial=position.epoch_step < run.steps_an_epoch)
    logs |= {f"val_{k}": value for k, value in evaluate(run, session.pending.check).items()}
    pace.end_epoch()
    row = _result(epoch, logs, pace)
    is_best = saver.end_epoch(logs, row)
    progress = progress._replace(seconds_left=pace.seconds_left)
    out.end_epoch(progress, logs["val_loss"], logs["val_accuracy"], is_best)
    if is_best:
        _save(run.step.model, session.directory / run_dir.BEST, out)
    _write_result(session.directory / run_dir.RESULTS, row, out)
    if session.board is not None:
        session.board.write(row)  # before callbacks, which may set the next epoch's learning rate
    return logs


def _train_epoch(session: _Session, hooks: keras.callbacks.CallbackList) -> dict[str, float]:
    """The epoch's steps that are left; returns the means over the epoch so far.

    The loss stays where it was computed, and is read back only when it is shown.
    """
    run, saver, pace, out = session.run, session.saver, session.pace, session.out
    position = saver.position
    if not position.epoch_step:
        run.step.reset_metrics()
    batches = shuffled_batches(
        run.train, run.batch_size, run.config.seed, position.epoch, position.epoch_step
    )
    count = min(run.steps_an_epoch, session.steps - position.epoch * run.steps_an_epoch)
    left = 0 if run.step.model.stop_training else count - position.epoch_step
    ahead = prefetched(run.step, batches, to_devices=run.config.prefetch_to_devices)
    for index, batch in zip(range(count - left, count), ahead, strict=False):
        if session.callbacks:
            hooks.on_train_batch_begin(index)
        logs = _train_batch(session, batch)
        if session.callbacks:
            hooks.on_train_batch_end(index, logs)
        if out.is_due():
            out.progress(_progress(run, position.epoch, index + 1, logs, pace))
        if run.step.model.stop_training:
            break
        session.pending.check()
        if index + 1 < count:
            saver.save_if_due()
    return {name: float(value) for name, value in position.logs.items()}


def _train_batch(session: _Session, batch: Batch) -> dict[str, tf.Tensor]:
    """One step; what an exception leaves half done is never saved."""
    saver, position = session.saver, session.saver.position
    saver.is_whole = False
    try:
        logs = session.run.step.train_batch(batch.x, batch.y, placed=batch.placed)
    except NonFiniteError as error:
        saver.is_whole = True
        raise NonFiniteError(
            f"step {position.step + 1:,}: {error} The update was not made. Lower --learning_rate, "
            f"or leave out such updates: python train.py --resume={session.directory} "
            "--nonfinite=skip."
        ) from None
    position.add_step(logs)
    saver.is_whole = True
    session.pace.add_step(batch.y.shape[0])
    return logs


def evaluate(run: Run, check: Callable[[], None] | None = None) -> dict[str, float]:
    """{"loss": ..., "accuracy": ...} of the test examples, computed on the towers.

    Args:
        run: the run.
        check: called before each batch; may raise.
    """
    run.step.reset_metrics()
    logs: dict[str, Any] = {}
    batches = ordered_batches(run.test, run.batch_size)
    for x, y, placed in prefetched(
        run.step, batches, to_devices=run.config.prefetch_to_devices
    ):
        if check:
            check()
        logs = run.step.test_batch(x, y, placed=placed)
    return {name: float(value) for name, value in logs.items()}


def _evaluate_only(run: Run, out: Report) -> dict[str, list[float]]:
    logs = {f"val_{name}": value for name, value in evaluate(run).items()}
    out.line(report.validation_line(logs["val_loss"], logs["val_accuracy"], is_best=False))
    out.line("Done: evaluated, not trained (--epochs=0)")
    return {name: [value] for name, value in logs.items()}


# What is said and saved on the way


def _progress(run: Run, epoch: int, step: int, logs: dict[str, Any], pace: Pace) -> Progress:
    return Progress(
        epoch + 1,
        run.config.epochs,
        step,
        run.steps_an_epoch,
        float(logs["loss"]),
        float(logs["accuracy"]),
        pace.examples_per_second,
        pace.seconds_left,
    )


def _result(epoch: int, logs: dict[str, float], pace: Pace) -> run_dir.Result:
    return run_dir.Result(
        epoch=epoch + 1,
        loss=logs["loss"],
        accuracy=logs["accuracy"],
        val_loss=logs["val_loss"],
        val_accuracy=logs["val_accuracy"],
        seconds=pace.epoch_seconds,
        examples_per_second=pace.examples_per_second,
    )


def _write_result(path: Path, row: run_dir.Result, out: Report) -> None:
    """Adds the epoch's row to results.csv; goes on without it where that fails."""
    try:
        run_dir.append_result(path, row)
    except OSError as error:
        out.warn(f"{path} cannot be written ({error.strerror}); training goes on.")


def _save(model: keras.Model, path: Path, out: Report) -> bool:
    """Saves the model for Keras alone to load; goes on without where that fails."""
    if not all(bool(tf.reduce_all(tf.math.is_finite(v.value))) for v in model.weights):
        out.warn(f"{path} is not written: the model holds NaN or infinite values.")
        return False
    try:
        run_dir.write_atomically(path, model.save)
    except OSError as error:
        out.warn(f"{path} cannot be written ({error.strerror}); what it held before is intact.")
        return False
    return True


def _num_skipped(run: Run, position: Position) -> int:
    """Updates that were left out: the optimizer has not counted them."""
    return position.step - int(run.step.optimizer.iterations)


def _warn_skipped(run: Run, out: Report, count: int) -> None:
    """Says how many updates the epoch has left out."""
    if not count:
        return
    scale = getattr(run.step.optimizer, "dynamic_scale", None)
    why = "a NaN or infinite loss or gradient"
    if scale is not None:
        why += f"; the loss scale is {float(scale):,.0f} now"
    out.warn(f"{count:,} update{'s' * (count != 1)} left out in this epoch: {why}.")


def _skipped(run: Run, position: Position) -> str:
    count = _num_skipped(run, position)
    return f"; {count:,} of {position.step:,} updates left out" if count else ""


def _done(position: Position, run: Run) -> str:
    """"12 epochs", or "1,500 steps" where the last epoch is not complete."""
    epochs, rest = divmod(position.step, run.steps_an_epoch)
    return f"{position.step:,} steps" if rest else f"{epochs} epoch{'s' * (epochs != 1)}"


def _best(history: dict[str, list[float]], monitor: str) -> str:
    values = history.get(monitor, [])
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return f"no finite {monitor}" if values else "no epoch is complete"
    best = max(finite) if "accuracy" in monitor else min(finite)
    return f"best {monitor} {best:.4f} (epoch {values.index(best) + 1})"


def _describe_models(position: Position, run: Run, out: Report) -> None:
    """Which weights are in which file: the last ones are never replaced by the best ones."""
    files = f"{run_dir.FINAL} holds the weights after {_done(position, run)}"
    if position.best_step is not None:
        epoch = num_steps(position.best_step, run.steps_an_epoch)
        files += f", {run_dir.BEST} those of epoch {epoch}, the best by {run.config.monitor}"
    out.line(report.labelled("Models", files))


@contextmanager
def _dtype_policy(name: str) -> Iterator[None]:
    """Builds and traces under a Keras dtype policy, and restores the caller's."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
