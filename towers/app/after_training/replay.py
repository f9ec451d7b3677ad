"""Makes steps of a run again, from one of its checkpoints: --replay and --audit.

    run directory           temporary directory
        config.json    -->      config.json
        checkpoints/   -->      checkpoints/epoch-3-step-1480    the newest one before the steps
                                ledger.csv                       of the steps that are made again

The run's own directory stays as it is. Its callbacks and validations run again, because they may
change the next steps.
"""

import csv
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from towers.app import run_dir
from towers.app.config import TrainConfig
from towers.app.continued import continued_config
from towers.app.diagnosis.describe import describe
from towers.app.loop import Loop
from towers.app.reporting.progress import ProgressLines
from towers.app.reporting.report import Report, labelled
from towers.app.reporting.time_spent import TimeSpent
from towers.app.training.build import Run, build, keras_settings
from towers.app.training.loaded import compared_options, load_newest
from towers.app.training.several_workers import check_same
from towers.app.training.task import load_callbacks
from towers.divide.prefetch import prefetched
from towers.machine import files, signals
from towers.machine.devices import HOST
from towers.machine.keras_internals import all_layers
from towers.machine.replaced import replaced
from towers.resume import checkpoints, directories
from towers.resume.after_step import AfterStep
from towers.resume.checkpointer import Checkpointer
from towers.resume.epoch import Epoch
from towers.resume.ledger import LEDGER, Line, read_ledger
from towers.resume.snapshot import variables_of
from towers.resume.train_state import Logs, TrainState
from towers.step.digests import as_digits, sum_of_bits
from towers.step.structures import Structure, as_tensor, map_tensors


class _ReachedError(Exception):
    """Ends a replay before a step."""


class _EndBefore(keras.callbacks.Callback):
    """Ends a replay before a step; it is the last callback, so all others have prepared the step."""

    def __init__(self, state: TrainState, step: int) -> None:
        super().__init__()
        self._state, self._step = state, step

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self._state.step == self._step - 1:
            raise _ReachedError


def replay(given: Mapping[str, object], directory: str, step: int, out: Report) -> dict[str, Any]:
    """Makes the steps of a run again, from its newest checkpoint before `step` to `step`.

    given: the flags that the user gave, such as another number of devices.

    Returns digests as JSON values. "lines" are the ledger's, one for each step before `step`. The
    others are for `step` itself, by name. "state" and "update" are the variables before and after
    it. "outputs" of the layers and "gradients" are computed on one device.
    """
    with _copied(given, directory, lambda position: position["step"] < step, ledger=1) as config:
        run, state = _made_again(config, lambda run: step, out)
        if state.step != step - 1:
            raise ValueError(f"at ({step:,}): the run in {directory} ends before this step.")
        found = _inspected(run, state)
        for name, digests in found.items():
            for place, digits in digests.items():
                out.line(labelled(name.capitalize(), f"{digits} {place}"))
        return {"lines": read_ledger(Path(str(config.resume), LEDGER)), **found}


def audit(given: Mapping[str, object], directory: str, epoch: int, out: Report) -> bool:
    """Makes an epoch of a run again, and returns whether all digests are equal."""
    claimed = [line for line in read_ledger(Path(directory, LEDGER)) if line.epoch == epoch]
    with directories.explained(directory, "audit"):
        text = files.read_text(Path(directory, run_dir.RESULTS), checkpoints.LARGEST_MANIFEST)
    rows = csv.DictReader(text.splitlines())
    weights = [row["digest"] for row in rows if row["epoch"] == str(epoch)]
    if not weights:
        raise ValueError(f"epoch ({epoch}) is none of the complete epochs in {directory}.")

    def begins(position: Mapping[str, Any]) -> bool:
        return (position["epoch"], position["epoch_step"]) == (epoch - 1, 0)

    with _copied(given, directory, begins) as config:
        run, state = _made_again(config, lambda run: epoch * run.steps_an_epoch + 1, out)
        if not run.workers.is_chief:  # which has the ledger
            return True
        made = read_ledger(Path(str(config.resume), LEDGER))
    ours, theirs = [*made, *state.results[epoch - 1][-1:]], [*claimed, *weights]
    differ = [then for now, then in zip(ours, theirs, strict=False) if now != then]
    if ours == theirs:
        out.line(f"Equal: {len(made)} lines of {LEDGER}, and the weights after epoch {epoch}")
    elif differ and isinstance(differ[0], Line):
        out.line(f"Different: epoch {epoch} at step {differ[0].step:,}, or before")
    else:
        out.line(f"Different: the weights after epoch {epoch}, or the number of lines in {LEDGER}")
    return ours == theirs


@contextmanager
def _copied(
    given: Mapping[str, object],
    directory: str,
    is_wanted: Callable[[Mapping[str, Any]], bool],
    **changed: Any,
) -> Iterator[TrainConfig]:
    """Gives the configuration of a copy of the run, with its newest wanted checkpoint.

    is_wanted: chooses by the position in a checkpoint. changed: fields of the configuration.
    """
    config = continued_config(directory, {**given, "resume": directory})
    folder = Path(directory, directories.CHECKPOINTS)
    paths = checkpoints.find(folder)
    path = next((p for p in paths if is_wanted(checkpoints.read(p).state["position"])), None)
    if path is None:
        raise ValueError(
            f"{folder} keeps no checkpoint to begin at, but only {[p.name for p in paths]}. Train "
            "with a larger `keep_checkpoints` to make earlier steps again."
        )
    with tempfile.TemporaryDirectory(prefix="towers-replay-") as copy:
        target = Path(copy, directories.CHECKPOINTS, path.name)
        shutil.copytree(path, target, symlinks=True)
        yield dataclasses.replace(config, resume=copy, run_dir=copy, **changed)


def _made_again(
    config: TrainConfig, end: Callable[[Run], int], out: Report
) -> tuple[Run, TrainState]:
    """Trains a copied run up to the step `end(run)`, which is not made; returns where it is."""
    with keras_settings(config), signals.deferred() as pending:
        run = build(config)
        callbacks = load_callbacks(config.callbacks)
        checkpointer = Checkpointer(Path(str(config.resume)), run.workers, out.warn)
        with closing(checkpointer), compared_options(run) as options:
            state = load_newest(run, checkpointer, callbacks, check_same(run), options)
            describe(run, out, f"from step {state.step:,}")
            after = AfterStep(run.step.model, state, checkpointer, pending, run.workers)
            stop = _EndBefore(state, end(run))
            with suppress(_ReachedError):
                Loop(
                    run,
                    after,
                    ProgressLines(out, run, state, TimeSpent(0.0)),
                    [],
                    [*callbacks, stop],
                ).train()
    return run, state


def _inspected(run: Run, state: TrainState) -> dict[str, dict[str, str]]:
    """Makes the next step of a run, and returns the digests of its parts, by name and place."""
    step, model = run.step, run.step.model
    epoch = Epoch(run.batch_size, run.config.seed, state.epoch, state.epoch_step, step.own_rows)
    batch = next(iter(prefetched(step, run.train.batches(epoch))))
    data = map_tensors(as_tensor, (*batch[:-1], None)[:3])
    variables: dict[str, keras.Variable] = {}
    for group, found in variables_of(step).items():
        if group != "metrics":
            variables |= {f"{group}/{i}/{v.path}": v for i, v in enumerate(found)}
    before = _digests(variables)
    alone = step.steps.divided["gradients"]
    alone.prepare(data)  # without the notes below, which would be taken back as its assignments
    outputs: dict[str, tf.Variable] = {}
    with ExitStack() as stack:
        for i, layer in enumerate(all_layers(model)):
            with tf.device(HOST):
                kept = tf.Variable(0, dtype=tf.int64)
            note = functools.partial(_noting, f"{i}/{layer.name}", kept, outputs)
            stack.enter_context(replaced(layer, "call", note))
        _, gradients = alone.run_undivided(data)
    step.train_batch(**batch._asdict())
    paths = [variable.path for variable in step.trainable_variables]
    return {
        "state": before,
        "batch": {"batch": as_digits(sum_of_bits(batch[:-1]))},
        "outputs": {name: as_digits(value.numpy()) for name, value in outputs.items()},
        "gradients": _digests(dict(zip(paths, gradients, strict=True))),
        "update": _digests(variables),
    }


def _digests(values: Mapping[str, keras.Variable | tf.Tensor]) -> dict[str, str]:
    """Returns the digests of variables or tensors by name."""
    digests = {}
    for name, value in values.items():
        if hasattr(value, "path"):
            value = value.value.read_value()
        digests[name] = as_digits(sum_of_bits(value))
    return digests


def _noting(
    name: str, kept: tf.Variable, outputs: dict[str, tf.Variable], call: Callable[..., Structure]
) -> Callable[..., Structure]:
    """Returns a layer's `call` that also assigns the digest of its result to `kept`.

    The first call adds `kept` to `outputs`, which so get the order of the calls.
    """

    @functools.wraps(call)
    def noted(*args: object, **kwargs: object) -> Structure:
        result = call(*args, **kwargs)
        outputs.setdefault(name, kept).assign(sum_of_bits(result))
        return result

    return noted
