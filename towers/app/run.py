"""Implements train(config), which trains a model and writes its run directory."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras

from towers.app.after_training import export
from towers.app.after_training.confusion import confusion_of_run
from towers.app.config import TrainConfig
from towers.app.continued import resolve_config
from towers.app.diagnosis.describe import describe, show_plan, verified
from towers.app.diagnosis.enough_towers import with_enough_towers
from towers.app.diagnosis.profile import show_profile
from towers.app.loop import Loop, evaluate
from towers.app.machine_fields import AUTO
from towers.app.reporting import report, run_files
from towers.app.reporting.progress import ProgressLines
from towers.app.reporting.report import Report, format_values, labelled, resume_words
from towers.app.reporting.time_spent import CALLBACKS, TimeSpent, process_seconds
from towers.app.training import several_workers
from towers.app.training.build import Run, build, keras_settings
from towers.app.training.failures import failures_explained
from towers.app.training.loaded import compared_options, load_newest
from towers.app.training.task import UserObjects, is_python, load_callbacks
from towers.app.training_fields import WARN
from towers.machine import environment, files, hang, places, signals
from towers.machine.argument_names import names_checked
from towers.machine.devices import placement
from towers.machine.terminal import CapturedStderr
from towers.app import run_dir
from towers.resume import directories, remote_dir
from towers.resume.after_step import AfterStep
from towers.resume.checkpointer import Checkpointer
from towers.resume.train_state import TrainState
from towers.step.errors import NonFiniteError
from towers.workers import watch, workers
from towers.workers.cluster import Cluster
from towers.workers.written_files import check_writers


@names_checked
def train(
    config: TrainConfig,
    callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None = None,
    *,
    model: keras.Model | None = None,
    train: Any = None,
    test: Any = None,
    captured: CapturedStderr | None = None,
) -> dict[str, list[float]]:
    """Trains a model and writes a run directory.

    ```python
    towers.train(towers.TrainConfig(epochs=3), model=compiled, train=(x, y), test=(x_test, y_test))
    towers.train(towers.TrainConfig(resume="runs/python-001"), model=..., train=..., test=...)
    ```

    Args:
        config: the configuration of the run.
        callbacks: a Keras callback or a list of them, called after those that `config` names. A
            callback may end the run by `model.stop_training`.
        model: a model to train, in place of the one that `config` names. A compiled model brings
            its loss, metrics and optimizer; any other model is trained as a classifier.
        train: training data: x, (x, y) or (x, y, sample_weight), where each is an array [N, ...] or
            a structure of arrays; or an unbatched tf.data.Dataset of such elements.
        test: validation data in the same forms; None for no validation.
        captured: holds libraries' messages back until there is a log.txt.

    Returns:
        The history of Keras: {"loss": [one value for each epoch], "val_accuracy": ...}.

    Raises:
        ValueError: the configuration does not fit the machine, the data or the existing files, or
            the trained model holds NaN or infinite values, or Keras does not read it back.
        LostDirectoryError: final.keras or best.keras could not be written.
    """
    spent = TimeSpent(process_seconds() if captured else 0.0)
    environment.check()
    begun = places.here()  # data, layers and callbacks may move the process
    cluster = workers.join_workers()
    watch.set_timeout(config.worker_timeout)
    objects = UserObjects(model, train, test)
    if config.resume == AUTO or config.resume is not None and config.run_dir is None:
        config = resolve_config(config.given())
    config = objects.named_in(config)
    _check_environment(config, cluster)
    with ExitStack() as stack:
        stack.enter_context(keras_settings(config))
        lines = f"its lines go to {several_workers.log_name(cluster)} in the run's directory"
        out = stack.enter_context(closing(report.report_of(cluster, lines)))
        if captured is not None:
            stack.enter_context(out.show_warnings())
        url = None
        if cluster.is_chief and not config.plan:
            url = config.run_dir
        mirror = stack.enter_context(
            remote_dir.mirrored(url, out.warn, resume=config.resume is not None)
        )
        if mirror is not None and mirror.found and config.resume is None:
            raise run_dir.not_empty(mirror.url, run_dir.CONFIG in mirror.found)
        with failures_explained(config):
            run = build(config, objects)
            all_callbacks = load_callbacks(config.callbacks, callbacks)
            if config.num_towers == AUTO:
                run = with_enough_towers(run, out, captured)
        if config.plan:
            describe(run, out, "plan")
            show_plan(run, out)
            return {}
        return _run(run, all_callbacks, out, begun, captured, mirror, spent)


def _check_environment(config: TrainConfig, cluster: Cluster) -> None:
    """Raises ValueError for what the packages, files and workers of this machine do not allow.

    It is called before the data are read, which may take minutes.
    """
    if config.tensorboard and find_spec("tensorboard") is None:
        raise ValueError(
            "`tensorboard` needs the package tensorboard. Install it with: "
            "pip install 'tf-towers[tensorboard]'"
        )
    if config.resume is None and cluster.is_chief and not directories.is_remote(config.run_dir):
        run_dir.check(config.run_dir)
    export.check(config.export)
    if cluster.num_workers > 1:
        _check_for_workers(config, cluster)


def _check_for_workers(config: TrainConfig, cluster: Cluster) -> None:
    """Raises ValueError for what only a single worker does."""
    for name, value in (("plan", True), ("profile", True), ("num_towers", AUTO)):
        if getattr(config, name) == value:
            raise ValueError(
                f"{name}={value} works with one worker, and the environment names "
                f"{cluster.num_workers}. Unset TF_CONFIG for it."
            )


def _run(
    run: Run,
    callbacks: Sequence[keras.callbacks.Callback],
    out: Report,
    begun: Path,
    captured: CapturedStderr | None,
    mirror: remote_dir.Mirror | None,
    spent: TimeSpent,
) -> dict[str, list[float]]:
    """Trains, evaluates or profiles in the run's directory, and returns the history."""
    config, cluster = run.config, run.workers
    # Errors of the model and the data come before there is a directory.
    check_writers(cluster, callbacks)
    trains, verification = config.epochs > 0 and not config.profile, None
    unread = trains and run_files.unreadable(run.step.model)
    data = several_workers.check_same(run)
    if config.verify_gradients and not config.profile:
        with failures_explained(config, Path(os.devnull)):
            verification = verified(run)
    directory = _make_directory(run, begun, mirror)
    log, shown = directory / several_workers.log_name(cluster), mirror.url if mirror else directory
    checkpointer = Checkpointer(
        directory, cluster, out.warn, every=config.checkpoint_every,
        keep=config.keep_checkpoints, mirror=mirror,
    )  # fmt: skip
    with (
        directories.locked(directory) if cluster.is_chief else nullcontext(),
        failures_explained(config, log),
        closing(checkpointer),
        compared_options(run) as options,
    ):
        state = load_newest(run, checkpointer, callbacks, data, options)
        _check_position(run, state, begun, is_new=checkpointer.found is None)
        out.log = log
        if captured is not None:
            with suppress(OSError):  # the report warns about it when it writes its next line
                captured.move_to(log)
        describe(run, out, f"run: {shown}")
        if mirror is not None:
            out.line(labelled("Uploads", f"from {directory}, which goes at the end"))
        if unread:
            out.warn(unread)
        if config.resume is not None:
            report.describe_resumed(checkpointer.found, state, out)
        if config.profile:
            show_profile(run, directory / run_dir.PROFILE, out)
            return {}
        if verification is not None and verification.cause:
            out.warn(f"{verification}. The run continues, because verify_gradients={WARN}.")
        elif verification is not None:
            out.line(labelled("Verify", str(verification)))
        # The run is complete if it has done all steps or was stopped, and wrote its final model.
        is_over = state.step >= run.num_steps or state.is_stopped(config.early_stopping)
        model: keras.Model | Path = run.step.model
        if config.epochs == 0:
            history = _evaluate(run, out)
        elif is_over and checkpointer.finished_step == state.step:
            report.describe_complete(run, state, out)
            history, model = state.history, directory / run_dir.FINAL
            with directories.explained(directory):
                files.check_link(model)
        else:
            words = partial(resume_words, config, shown)
            with spent.kept_in(directory, out.warn) if cluster.is_chief else nullcontext():
                _train(run, state, words, out, callbacks, checkpointer, spent)
            history = run.step.model.history.history
        cluster.barrier()
        if cluster.is_chief:
            _export(run, model, begun, directory, out)
        return history


def _make_directory(run: Run, begun: Path, mirror: remote_dir.Mirror | None) -> Path:
    """Makes the directory of a new run, or finds the directory of a resumed run; returns its path."""
    config = run.config
    place = config.resume or config.run_dir
    if mirror is not None:
        place = str(mirror.copy)
    made = Path(place or "")  # other workers get the chief's
    if run.workers.is_chief and config.resume is None:
        name = "-".join(dict.fromkeys([config.model, config.dataset]))
        made = run_dir.create(place, name, config.to_json(), begun)
    directory = several_workers.shared_directory(run, made, begun)
    for folder in (run_files.FOLDER, run_dir.PROFILE):  # TensorFlow writes into them
        with directories.explained(directory):
            files.check_tree(directory / folder)
    return directory


def _check_position(run: Run, state: TrainState, begun: Path, *, is_new: bool) -> None:
    """Raises ValueError if the run has done more than it may, or cannot take its first values."""
    config = run.config
    # The values of a resumed run are in its checkpoint.
    if is_new and config.init_from is not None and not (begun / config.init_from).is_file():
        raise ValueError(f"init_from ({config.init_from}) is no file; name a .keras file.")
    if state.step > run.num_steps:
        name = "max_steps"
        if config.fast_dev_run:
            name = "fast_dev_run"
        elif config.epochs * run.steps_an_epoch < state.step:
            name = "epochs"
        done = report.amount(state.step, run.steps_an_epoch)
        raise ValueError(
            f"{name} ({getattr(config, name)}) is reached already: the run has done {done}, "
            "and is left as it is. Give a larger one, or leave it out to continue as before."
        )


def _evaluate(run: Run, out: Report) -> dict[str, list[float]]:
    """Evaluates the model as it is, and returns the values as the history of one epoch."""
    if run.test is None:
        raise ValueError("epochs=0 evaluates on test examples: give `test`.")
    values = evaluate(run)
    logs = {f"val_{name}": values[name] for name in run.metrics}
    out.line(format_values(logs))
    out.line("Done: evaluated, not trained (--epochs=0)")
    return {name: [value] for name, value in logs.items()}


def _export(run: Run, model: keras.Model | Path, begun: Path, directory: Path, out: Report) -> None:
    """Exports the trained model, or the model of a complete run's file, if it has a place."""
    place, tried = run.config.export, directory / run_dir.EXPORT
    if place is None and run.config.fast_dev_run and not tried.exists():
        place = str(tried)  # a bad export shows now, not after hours
    if place is not None:
        for line in export.export_model(model, str(begun / place), run.class_names, run.divided):
            out.line(line)


def _train(
    run: Run,
    state: TrainState,
    words: Callable[..., str],
    out: Report,
    callbacks: Sequence[keras.callbacks.Callback],
    checkpointer: Checkpointer,
    spent: TimeSpent,
) -> None:
    """Trains the remaining epochs and writes final.keras; `words` returns a command to resume."""
    config, cluster, directory = run.config, run.workers, checkpointer.directory
    files = run_files.RunFiles(run, directory, state, out.warn)
    writers: list[keras.callbacks.Callback] = []
    if cluster.is_chief:
        writers.append(files)
        if config.tensorboard:
            writers.append(run_files.TensorBoardLog(directory / run_files.FOLDER, out.warn))
    lines = ProgressLines(out, run, state, spent)
    seconds = None if config.hang_timeout == AUTO else float(config.hang_timeout)
    if cluster.num_workers > 1:
        seconds = 0.0
    name = "hang_timeout" if is_python(config) else "--hang_timeout"
    with hang.Watch(
        placement(run.step.tower_devices, run.step.local_towers.start),
        f"Resume from the last checkpoint: {words()}. "
        f"If it was at work, give it time with a larger {name}.",
        seconds,
        log=directory / several_workers.log_name(cluster),
        leave=out.close,
    ):
        with signals.deferred() as pending:
            after = AfterStep(run.step.model, state, checkpointer, pending, cluster)
            loop = Loop(run, after, lines, writers, callbacks)
            try:
                loop.train()
            except BaseException as error:
                if saved := loop.stop():
                    out.line(f"{saved}. Resume: {words()}")
                if isinstance(error, NonFiniteError):
                    raise NonFiniteError(
                        f"step {state.step + 1:,}: {error} The update was not made. Lower "
                        "`learning_rate`, or leave out such updates: "
                        f"{words(nonfinite='skip')}."
                    ) from None
                raise
            finally:
                if cluster.is_chief:
                    files.draw()
        fault: Exception | None = None
        if cluster.is_chief:
            with spent.within(CALLBACKS):
                fault = _save_final(files, words)
            if fault is None:
                checkpointer.finish(state)
        if config.confusion_matrix:
            confusion_of_run(run, directory, out)
    has_final = files.has_final or not cluster.is_chief
    report.describe_end(run, state, spent, out, has_final=has_final)
    if fault is not None:
        run.workers.barrier()
        raise fault


def _save_final(files: run_files.RunFiles, words: Callable[..., str]) -> Exception | None:
    """Writes final.keras; returns the error, with its remedy, if a file could not be written."""
    try:
        files.save_final()
    except places.LostDirectoryError as error:
        return places.LostDirectoryError(f"{error} Make room, then continue the run: {words()}.")
    except NonFiniteError as error:
        return NonFiniteError(f"{error} Begin a new run with a lower `learning_rate`.")
    except ValueError as error:
        return ValueError(
            f"{error} The last checkpoint holds the weights. Correct the class of that layer, so "
            f"that Keras saves all of it, then continue the run: {words()}."
        )
    return None
