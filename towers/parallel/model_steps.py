"""Runs the steps of a parallel model in Keras' loop, after creating all variables.

With GPUs, or to measure the noise scale of some steps, it replaces Keras' training function. The
new one copies shards to GPUs one step ahead:

Keras' loop:      train_function(iterator)   train_function(iterator) ...
here:             [ step 1 ............. ]   [ step 2 ............. ] ...
one more thread:  [ batch 2: to devices  ]   [ batch 3: to devices  ] ...
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from towers.divide.divided_step import DividedStep
from towers.divide.ran_once import RanOnce, warn_of
from towers.divide.repeatable import UNSAVED_NOISE
from towers.machine import hang
from towers.machine.user_lines import warn_user
from towers.parallel.model_state import (
    STATE, build, drop_iterator, forget_steps, step_of, towers_of,
)  # fmt: skip
from towers.step.checks import check_arrays, readable
from towers.step.errors import NewestBatch, first_error
from towers.step.metrics import overrides
from towers.divide.prefetch import placed_ahead
from towers.step.sharding import Placed
from towers.step.structures import Structure, batch_specs
from towers.workers.watch import watched
from towers.workers.workers import join_workers


# Keras' loops give one of these to their functions.
Batches: TypeAlias = tf.data.Iterator | Iterator[Structure] | list[Structure]


class PlacedBatches:
    """A train function for Keras' loop: takes an iterator and trains on its next batches."""

    def __init__(
        self, step: DividedStep, run: Callable[[Structure, Placed], Structure], num_steps: int,
        newest: NewestBatch,
    ) -> None:  # fmt: skip
        """
        run: runs the step on a batch and its placed shards. num_steps: the number of batches for
            each call, Keras' `steps_per_execution`. newest: is given the batch of each step.
        """
        self._step, self._run, self._num_steps, self._newest = step, run, num_steps, newest
        self._iterator: tf.data.Iterator | None = None
        self._batches: Iterator[tuple[Structure, Placed]] = iter(())

    def __call__(self, iterator: tf.data.Iterator) -> Structure:
        """Trains on the next batches and returns the logs; raises StopIteration if none is left."""
        if iterator is not self._iterator:
            self._iterator = iterator
            present = (  # None instead of the parts that Keras marks as absent
                keras.tree.map_structure(
                    lambda v: None if isinstance(v, tf.experimental.Optional) else v, element
                )
                for element in iterator
            )
            machine = self._step.machine
            is_placed = machine.policy.prefetch_to_devices
            self._batches = placed_ahead(machine if is_placed else None, present)
        logs = None
        for element, placed in itertools.islice(self._batches, self._num_steps):
            self._newest.given = element
            undivided = functools.partial(self._step.run_undivided, element)
            with readable(), watched(join_workers(), "a train step"), first_error(undivided):
                logs = self._run(element, placed)
        if logs is None:
            raise StopIteration
        return logs

    def close(self) -> None:
        """Drops the iterator. A batch that was read ahead is lost."""
        self._iterator, self._batches, self._newest.given = None, iter(()), None


def make_function(model: keras.Model, name: str, make: Callable, force: bool) -> None:
    """Makes Keras' function for step `name`, with a first call that creates all variables."""
    attribute, towers = f"{name}_function", towers_of(model)
    before = getattr(model, attribute)
    if force:  # the user has changed the model or its optimizer since `compile`
        forget_steps(model)
    told, model.jit_compile = model.jit_compile, False
    make(force)  # with XLA around the whole step, all towers would be on one device
    model.jit_compile = told
    function = getattr(model, attribute)
    if function is before:
        return

    def call(data: Batches) -> Structure:
        if isinstance(data, tf.data.Iterator) and towers.iterators.get(name) is not data:
            drop_iterator(model, name)  # the last epoch's
            towers.iterators[name] = data
        undivided = functools.partial(_run_undivided, model, name)
        with watched(join_workers(), f"a {name} step"), readable(), first_error(undivided):
            return function(data)

    def first_call(data: Batches) -> Structure:
        with hang.tracing(f"the first {name} step's making"):
            data = _make_variables(model, name, data)
            made: Callable = call
            step = step_of(model, name)
            is_ahead = model.steps_per_execution == 1 and step.machine.policy.prefetch_to_devices
            if (
                name == "train"
                and isinstance(data, tf.data.Iterator)
                and (towers.noise_scale or is_ahead)
            ):
                run: Callable = step.run if towers.measuring is None else towers.measuring.run
                newest = towers.newest[name]
                made = PlacedBatches(step, run, model.steps_per_execution, newest)
            setattr(model, attribute, made)
        results = made(data)
        _warn_of_what_ran_once(model, name)
        return results

    setattr(model, attribute, first_call)


def ran_once(model: keras.Model) -> list[RanOnce]:
    """
    Returns what a step of a parallel model runs once, although it has rows of the batch.

    Operations without a rule, or across rows, run once. They are exact, but towers wait for them.

    ```python
    parallel.fit(x, y, batch_size=1024)
    for row in towers.ran_once(parallel):
        print(row)  # file.py:31: MatMul (1.2 MB of rows, 40% of the step)
    ```

    Args:
        model: a parallel model that has trained, evaluated or predicted.

    Returns:
        named tuples with `line`, `operation`, `times`, `cause`, `num_bytes` and `share`, one for
        each line and type of operation. The largest share comes first. They describe the training
        step, or else the step that was made first.
    """
    if STATE not in vars(model):
        raise ValueError(f"model {model.name!r} is not parallel: call towers.make_parallel on it.")
    steps = towers_of(model).steps
    name = "train" if "train" in steps else next(iter(steps), "")
    if name:
        return steps[name].ran_once(_num_rows(model, name))
    return []


def _num_rows(model: keras.Model, name: str) -> int:
    """Returns the number of rows of the newest batch; 1 if there is none."""
    if (num_rows := step_of(model, name).num_rows) is not None:
        return num_rows
    batch = tf.nest.flatten(towers_of(model).newest[name].read())
    return next((v.shape[0] for v in batch if v is not None and v.shape.rank), 1)


def _warn_of_what_ran_once(model: keras.Model, name: str) -> None:
    """Warns, once for each model, of a divided step that does much work once."""
    towers, step = towers_of(model), step_of(model, name)
    if towers.num_towers > 1 and not towers.warned_of_speed:
        rows = step.ran_once(_num_rows(model, name))
        towers.warned_of_speed = warn_of(rows, model.name, "towers.ran_once(model)")


def _run_undivided(model: keras.Model, name: str) -> None:
    """Runs a step on one device on the newest batch, to raise its first error."""
    (batch,) = towers_of(model).newest[name].read() or (None,)
    if batch is not None:
        step_of(model, name).run_undivided(batch)


def run_step(model: keras.Model, name: str, data: Structure) -> Any:
    """Runs one step in Keras' loop. Returns the logs, or the outputs for "predict"."""
    step, measuring = step_of(model, name), towers_of(model).measuring
    with tf.control_dependencies(towers_of(model).newest[name].keep(data)):
        if name == "train" and measuring is not None:  # train_on_batch
            return measuring.run_in_graph(data)
        return step(data)


def _make_variables(model: keras.Model, name: str, data: Batches) -> Batches:
    """Creates all variables, so that Keras traces its function once; returns the same batches."""
    if isinstance(data, tf.data.Iterator):
        batch = data.element_spec
    elif isinstance(data, list):
        batch = data[0]
    else:
        batch = next(data)
        data = itertools.chain([batch], data)
    check_arrays(*(batch if isinstance(batch, tuple) else (batch,)))
    batch = batch_specs(batch)
    if not overrides(model, f"{name}_step"):  # an own step may take any tuple
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        build(model, x, *(() if name == "predict" else (y, sample_weight)))
    step = step_of(model, name)
    step.prepare(batch)
    step.check_agreement()
    towers_of(model).newest[name].prepare(batch)
    return data


def prepare_training(model: keras.Model, specs: Structure) -> list[keras.Variable]:
    """Creates all variables for these specs; returns those that Keras' lists may lack."""
    _make_variables(model, "train", [specs])
    step = step_of(model, "train")
    if step.has_unsaved_noise:
        warn_user(UNSAVED_NOISE)
    of_optimizer = model.optimizer.variables if model.optimizer else []
    unlisted = step.unlisted([*model.variables, *of_optimizer, *model.metrics_variables])
    measuring = towers_of(model).measuring
    return [*unlisted, *(measuring.noise.variables if measuring is not None else [])]
