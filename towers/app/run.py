"""train(config): from a configuration to a trained model, and the run directory it leaves."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import keras

from towers.app.after_training import export
from towers.resume import remote_dir, run_dir
from towers.resume.checkpointer import Checkpointer
from towers.app.continued import continued_config, resumed_directory
from towers.resume.optimizer_options import compared
from towers.resume.remote_dir import Mirror
from towers.resume.run_dir import Result, is_remote
from towers.resume.train_state import TrainState
from towers.app.config import AUTO, TrainConfig
from towers.resume import source
from towers.app.diagnosis.profile import show_profile
from towers.app.diagnosis.describe import describe, show_plan, show_verified, verified
from towers.app.diagnosis.verify import Verification
from towers.machine import environment, hang, places, signals
from towers.workers import watch, workers
from towers.machine.devices import placement
from towers.machine.places import LostDirectoryError
from towers.machine.terminal import CapturedStderr
from towers.app.named import one_line
from towers.app.recipe import starting_values
from towers.app.reporting import curves, outcome, report, tensorboard
from towers.app.reporting.formats import format_values
from towers.app.reporting.progress import ProgressLines
from towers.app.reporting.report import Report
from towers.step.nonfinite import NonFiniteError
from towers.app.training import deterministic, several_workers
from towers.app.training.build import Run, build
from towers.app.loop import Loop, evaluate
from towers.app.training.callbacks import check, load
from towers.app.training.loaded import data_digests, load_newest
from towers.app.training.memory import out_of_memory_explained
from towers.app.training.pace import Pace
from towers.app.training.run_files import BestModel, ResultsFile, save_model, unreadable
from towers.app.training.user_objects import UserObjects, is_python, title


def train(
    config: TrainConfig,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    *,
    model: keras.Model | None = None,
    train: Any = None,
    test: Any = None,
    captured: CapturedStderr | None = None,
) -> dict[str, list[float]]:
    """Trains a model, and leaves a run directory (see `run_dir`).

    ```python
    towers.train(towers.TrainConfig(epochs=3), model=compiled, train=(x, y), test=(x_test, y_test))
    towers.train(towers.TrainConfig(resume="runs/python-001"), model=..., train=..., test=...)
    ```

    Args:
        config: the run.
        callbacks: Keras callbacks; `model.stop_training` ends the run. Those that `config` names
            come before them.
        model: trained in place of the one that `config` names. What it was compiled with, its
            loss, metrics and optimizer, is the run's; a model that is not compiled is a classifier.
        train: what it is trained on: (x, y), (x, y, sample_weight) or x alone, arrays or
            structures of arrays [N, ...]; or an unbatched tf.data.Dataset of such elements.
        test: what it is validated on, likewise; None for no validation.
        captured: what is held back of libraries' messages until there is a log.txt.

    Returns:
        Keras' History.history: {"loss": [one an epoch], "val_accuracy": ...}.

    Raises:
        ValueError: the configuration does not fit the machine, the data, or the files there are;
            or the trained model holds NaN or infinite values.
        LostDirectoryError: final.keras or best.keras could not be written.
    """
    environment.check()
    begun = places.here()  # data, layers and callbacks may move the process
    cluster = workers.join_workers()
    watch.set_timeout(config.worker_timeout)
    if config.tensorboard:
        tensorboard.check_installed()
    objects = UserObjects(model, train, test)
    config = objects.named_in(_with_resumed(config))
    check(callbacks, "callbacks hold")
    if config.resume is None and cluster.is_chief and not is_remote(config.run_dir):
        run_dir.check(config.run_dir)
    export.check(config.export, config.export_pixels)
    several_workers.check_config(cluster, config)
    if config.deterministic:
        deterministic.enable(config.seed)  # before the first kernel
    with (
        _dtype_policy(config.precision),
        closing(report.report_of(cluster)) as out,
        out.own_warnings() if captured else nullcontext(),
        remote_dir.mirrored(
            config.run_dir if cluster.is_chief and not config.plan else None, out.warn,
            is_new=config.resume is None,
        ) as mirror,
    ):
        with deterministic.refusals_explained(config.deterministic):
            run = build(config, objects)
            callbacks = [*load(config.callbacks), *callbacks]
        if config.plan:
            describe(run, out, "plan")
            show_plan(run, out)
            return {}
        return _run(run, callbacks, out, begun, captured, mirror)


def _with_resumed(config: TrainConfig) -> TrainConfig:
    """The configuration, with that of the run that it goes on with, if it names one."""
    if config.resume != AUTO and (config.resume is None or config.run_dir is not None):
        return config
    given = config.given()
    directory = resumed_directory(given)
    if directory is None:
        return dataclasses.replace(config, resume=None)
    return continued_config(directory, given)


def _run(
    run: Run,
    callbacks: Sequence[keras.callbacks.Callback],
    out: Report,
    begun: Path,
    captured: CapturedStderr | None,
    mirror: Mirror | None,
) -> dict[str, list[float]]:
    """Trains, evaluates or profiles, in the run's directory."""
    config, cluster = run.config, run.workers.cluster
    if config.export_pixels:
        export.check_pixels(run.step.model, run.divided)
    saves = config.epochs > 0 and not config.profile
    unread = unreadable(run.step.model) if saves else None
    several_workers.check_same(run, {})
    verification = _verified(run)
    directory = several_workers.directory(
        run, lambda config: _make_directory(config, begun, mirror), begun
    )
    log = directory / several_workers.log_name(cluster)
    checkpointer = Checkpointer(
        directory, run.workers, out.warn, every=config.checkpoint_every, mirror=mirror
    )
    with (
        run_dir.locked(directory) if cluster.is_chief else nullcontext(),
        out_of_memory_explained(run, log),
        deterministic.refusals_explained(config.deterministic, log),
        closing(checkpointer),
        compared(run.own_optimizers) as options,
    ):
        data = data_digests(run)
        several_workers.check_same(run, data)
        loaded = load_newest(run, directory, checkpointer, callbacks, data, options)
        if loaded is None:
            starting_values.check_file(config, begun)
        else:
            _check_limit(run, loaded.train_state)
        _open_log(log, out, captured)
        describe(run, out, f"run: {mirror.url if mirror else directory}")
        if mirror is not None:
            out.line(report.labelled("Uploads", f"from {directory}, which goes at the end"))
        if unread is not None:
            out.warn(unread)
        if config.resume is not None or loaded is not None:
            outcome.describe_resumed(loaded, out)
        if config.profile:
            show_profile(run, directory / run_dir.PROFILE, out)
            return {}
        if verification is not None:
            show_verified(verification, out)
        train_state = TrainState() if loaded is None else loaded.train_state
        model: keras.Model | Path = run.step.model
        fault: Exception | None = None
        if config.epochs == 0:
            history = _evaluate_only(run, out)
        elif _is_complete(run, train_state, checkpointer):
            outcome.describe_complete(run, train_state, out)
            history, model = train_state.history, directory / run_dir.FINAL
        else:
            history, fault = _train(
                run, train_state, directory, out, callbacks, checkpointer, mirror
            )
        run.workers.barrier()
        if fault is not None:
            raise fault
        if config.export is not None and cluster.is_chief:
            for line in export.export_model(
                model, str(begun / config.export), run.class_names, run.divided,
                config.export_pixels,
            ):
                out.line(line)
        return history


def _verified(run: Run) -> Verification | None:
    """The result of --verify_gradients, before there is a directory; None without the flag."""
    config, nowhere = run.config, Path(os.devnull)
    if not config.verify_gradients or config.profile:
        return None
    with (
        out_of_memory_explained(run, nowhere),
        deterministic.refusals_explained(config.deterministic, nowhere),
    ):
        return verified(run)


def _train(
    run: Run,
    train_state: TrainState,
    directory: Path,
    out: Report,
    callbacks: Sequence[keras.callbacks.Callback],
    checkpointer: Checkpointer,
    mirror: Mirror | None,
) -> tuple[dict[str, list[float]], Exception | None]:
    """All epochs that are left, then final.keras; the error of a model that is not in its file."""
    model, steps = run.step.model, run.num_steps
    pace = Pace(
        steps - train_state.step, source.num_steps(steps, run.steps_an_epoch) - train_state.epoch
    )

    shown = mirror.url if mirror else directory
    with _watch(run, directory, shown, out):
        with signals.deferred() as pending, _nonfinite_explained(run, train_state, shown):
            loop = Loop(
                run, train_state, checkpointer, pending, pace,
                ProgressLines(out, run, train_state, pace),
                _files(run, train_state, directory, out), callbacks,
            )
            try:
                loop.train()
            except BaseException:
                saved = loop.stop()
                if saved is not None:
                    step, is_saved = saved
                    what = "saved at" if is_saved else "the last checkpoint is that of"
                    words = outcome.resume_words(run.config, shown)
                    out.line(f"{what} step {step}. Resume: {words}")
                raise
            finally:
                _draw(run, train_state, directory, out)
        has_final, fault = True, None
        if run.workers.cluster.is_chief:
            has_final, fault = _save_final(run, train_state, directory, shown)
            if fault is None:
                checkpointer.finish(train_state)
    outcome.describe_end(run, train_state, pace.run_seconds, out, has_final=has_final)
    return model.history.history, fault


def _draw(run: Run, train_state: TrainState, directory: Path, out: Report) -> None:
    """results.png, however the run has ended."""
    if not run.workers.cluster.is_chief:
        return
    try:
        results = [Result.of(row, run.columns) for row in train_state.results]
        name = title(run.config, run.step.model)
        curves.draw_curves(directory / curves.CURVES, results, name, run.monitor)
    except Exception as error:  # whatever matplotlib raises
        out.warn(
            f"{curves.CURVES} cannot be drawn ({one_line(error)}); nothing else is missing."
        )


def _save_final(
    run: Run, train_state: TrainState, directory: Path, shown: Path | str
) -> tuple[bool, Exception | None]:
    """Writes final.keras; whether it is written, and the error where this or best.keras is not."""
    has_final = False
    try:
        save_model(run.step.model, directory / run_dir.FINAL)
        has_final = True
        if train_state.best_saved != train_state.best.step:
            best = directory / run_dir.BEST
            raise LostDirectoryError(f"{best} does not hold the weights of the best epoch.")
    except LostDirectoryError as error:
        words = outcome.resume_words(run.config, shown)
        text = f"{error} Make room, then continue the run: {words}."
        return has_final, LostDirectoryError(text)
    except NonFiniteError as error:
        return has_final, NonFiniteError(f"{error} Begin a new run with a lower `learning_rate`.")
    return has_final, None


def _watch(run: Run, directory: Path, shown: Path | str, out: Report) -> hang.Watch:
    """The watch over a run that may hang; several workers watch each other."""
    config, cluster = run.config, run.workers.cluster
    timeout = config.hang_timeout if cluster.num_workers == 1 else 0
    name = "hang_timeout" if is_python(config) else "--hang_timeout"
    return hang.Watch(
        placement(run.step.tower_devices, run.step.mine.start),
        f"Resume from the last checkpoint: {outcome.resume_words(config, shown)}. "
        f"If it was at work, give it time with a larger {name}.",
        None if timeout == AUTO else float(timeout),
        max(hang.LEAST_SECONDS, 1.1 * config.data_timeout),
        directory / several_workers.log_name(cluster),
        out.close,
    )


def _files(
    run: Run, train_state: TrainState, directory: Path, out: Report
) -> list[keras.callbacks.Callback]:
    """The callbacks that write the run's files, except checkpoints; only the chief has any."""
    if not run.workers.cluster.is_chief:
        return []
    files: list[keras.callbacks.Callback] = [
        BestModel(run.step, directory, train_state, out.warn),
        ResultsFile(directory, train_state, run.columns, out.warn),
    ]
    if run.config.tensorboard:
        folder = directory / tensorboard.FOLDER
        files.append(tensorboard.TensorBoardLog(folder, out.warn, run.config.histograms))
    return files


def _make_directory(config: TrainConfig, begun: Path, mirror: Mirror | None) -> Path:
    """The run's directory, a new one, or the one to go on in: as a path in `begun`."""
    if config.resume is not None:
        return mirror.copy if mirror else Path(config.resume)
    name = "-".join(dict.fromkeys([config.model, config.dataset]))
    place = str(mirror.copy) if mirror else config.run_dir
    return run_dir.create(place, name, config.to_json(), begun)


def _open_log(path: Path, out: Report, captured: CapturedStderr | None) -> None:
    """From now on log.txt takes what is said, and what was held back of libraries' messages."""
    out.open_log(path)
    if captured is not None:
        with suppress(OSError):  # the report warns of it, at its next line
            captured.move_to(path)


def _check_limit(run: Run, train_state: TrainState) -> None:
    """Raises ValueError where a run that goes on is past the end that it would have now."""
    if train_state.step > run.num_steps:
        config = run.config
        name = "epochs" if config.epochs * run.steps_an_epoch < train_state.step else "max_steps"
        done = outcome.amount(train_state.step, run.steps_an_epoch)
        raise ValueError(
            f"{name} ({getattr(config, name)}) is reached already: the run has done {done}, and is "
            "left as it is. Give a larger one, or leave it out to go on as far as before."
        )


def _evaluate_only(run: Run, out: Report) -> dict[str, list[float]]:
    """--epochs=0."""
    if run.test is None:
        raise ValueError("epochs=0 evaluates on test examples, and there are none; give `test`.")
    values = evaluate(run)
    logs = {f"val_{name}": values[name] for name in run.metrics}
    out.line(format_values(logs))
    out.line("Done: evaluated, not trained (--epochs=0)")
    return {name: [value] for name, value in logs.items()}


def _is_complete(run: Run, train_state: TrainState, checkpointer: Checkpointer) -> bool:
    """Whether the run has ended after all its steps, or was stopped, with its final model."""
    step = checkpointer.finished_step
    if step is None or step != train_state.step:
        return False
    return train_state.is_stopped(run.config.early_stopping) or step >= run.num_steps


@contextmanager
def _nonfinite_explained(
    run: Run, train_state: TrainState, directory: Path | str
) -> Iterator[None]:
    """Adds to a NonFiniteError the step that it came in, and the ways out."""
    try:
        yield
    except NonFiniteError as error:
        words = outcome.resume_words(run.config, directory, nonfinite="skip")
        text = (
            f"step {train_state.step + 1:,}: {error} The update was not made. Lower "
            f"`learning_rate`, or leave out such updates: {words}."
        )
        raise NonFiniteError(text) from None


@contextmanager
def _dtype_policy(name: str) -> Iterator[None]:
    """Builds and traces under a Keras dtype policy, and restores the caller's."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
