"""Restores the newest checkpoint of a train.py run after checking that it fits the run."""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from towers.app.config import TrainConfig
from towers.app.continued import identity
from towers.app.training.build import Run
from towers.divide.program import program_digest
from towers.divide.repeatable import UNSAVED_NOISE
from towers.app import run_dir
from towers.resume import checkpoints, directories
from towers.resume.checkpointer import Checkpointer
from towers.resume.snapshot import FULL_BATCH, OPTIONS, compared, variables_of
from towers.resume.stateful import Json
from towers.resume.train_state import TrainState


def compared_options(run: Run) -> AbstractContextManager[dict[str, Json]]:
    """Gives the options of a script's optimizer, which `load_newest` compares."""
    # Only a script's compiled optimizer is compared; config.json has all others and schedules.
    is_own = run.custom_loss and not run.config.has_schedule
    return compared({"optimizer": run.step.optimizer} if is_own else {})


def load_newest(
    run: Run,
    checkpointer: Checkpointer,
    callbacks: Sequence[keras.callbacks.Callback],
    data: Mapping[str, str],
    options: Mapping[str, Json],
) -> TrainState:
    """Restores the newest undamaged checkpoint, and returns the run's position; writes no file.

    It also sets what the checkpoints hold. `data` are the digests of the splits "train" and "test";
    `options` are the script's optimizer arguments, such as {"optimizer.learning_rate": 0.001}.

    Raises ValueError if all checkpoints are damaged, the newest is for other data, another model
    or another configuration, or a start from step 0 would replace results.
    """
    config, defaults = identity(run.config), identity(TrainConfig())
    full_sizes = run.step.full_batch.sizes
    held = {
        "config": config,
        "data": data,
        OPTIONS: options,
        FULL_BATCH: lambda _: int(full_sizes["train"].numpy()),
    }
    checkpointer.hold(lambda: variables_of(run.step), callbacks, held)
    resume, directory = run.config.resume is not None, checkpointer.directory
    if resume and run.workers.is_chief:
        folder = directory / directories.CHECKPOINTS
        if (directory / run_dir.RESULTS).exists() and not checkpoints.find(folder):
            raise ValueError(
                f"{folder} holds no checkpoint, and {directory} holds results that a start from "
                "step 0 would replace. Name a new directory with `run_dir`."
            )
    found = checkpointer.read(resume, has_final=(directory / run_dir.FINAL).is_file())
    if found is None:
        return TrainState()
    state, path = found.checkpoint.state, found.path
    with checkpointer.expecting("a run"):
        # A field that is newer than the checkpoint had its default.
        then = {name: state["config"].get(name, value) for name, value in defaults.items()}
        checkpointer.check_same(
            then,
            config,
            options,
            "run",
            f"Restore {run_dir.CONFIG} and compile as then, or start a new run.",
        )
        for split in sorted({*state["data"], *data}, reverse=True):
            if state["data"].get(split) != data.get(split):
                raise ValueError(
                    f"the {split} data are not those that {path} was trained on: their digest has "
                    "changed. Restore them, name their place with data_dir=DIR beside `resume`, or "
                    "start a new run."
                )
        train_state = TrainState.from_json(state["position"])
        checkpointer.settle_stop(train_state)
        for size in full_sizes.values():
            size.assign(state[FULL_BATCH])
        # A row also holds the epoch's number, seconds, speed and digest.
        if any(len(row) != len(run.columns) + 4 for row in train_state.results):
            raise ValueError(
                f"{path} belongs to a run with other columns than {', '.join(run.columns)}: the "
                "metrics have changed. Compile the model as it was, or start a new run."
            )
    build_metrics(run, checkpointer)
    checkpointer.restore(callbacks=False)
    return train_state


def put_in_place(run: Run, train_state: TrainState, checkpointer: Checkpointer) -> None:
    """Restores variables and callbacks from the newest checkpoint, or writes the first checkpoint.

    Call it after the callbacks have begun, so that it restores their state. It writes config.json,
    so a new --epochs becomes the run's setting. A file that cannot be written is a ValueError.
    """
    is_new, directory = checkpointer.found is None, checkpointer.directory
    if is_new:
        build_metrics(run, checkpointer)
    checkpointer.restore()
    checkpointer.found = None
    if run.workers.is_chief:
        config = dataclasses.replace(run.config, resume=None)
        graph, _ = run.step.steps.divided["train"].prepare(run.train.specs)
        made_with = {
            "program": program_digest(graph),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        }
        run_dir.write_config(directory, config.to_json(made_with), run.class_names)
        directories.remove_temporary_files(directory)
    try:
        if is_new:
            checkpointer.save_first(train_state)
    except ValueError:
        if run.config.resume is None:  # the directory is new and holds nothing to resume
            shutil.rmtree(directory, ignore_errors=True)
        raise


def build_metrics(run: Run, checkpointer: Checkpointer) -> None:
    """Creates the metrics' variables, which are part of a checkpoint."""
    run.step.build_metrics("train", *run.train.specs)
    if run.step.has_unsaved_noise:
        checkpointer.warn(UNSAVED_NOISE)
