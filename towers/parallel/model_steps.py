"""Creates the steps of a parallel model on their first batch, and keeps them beside the model.

It also replaces Keras' training function by one that copies shards to the devices one step ahead.

Keras' loop:      train_function(iterator)   train_function(iterator) ...
here:             [ step 1 ............. ]   [ step 2 ............. ] ...
one more thread:  [ batch 2: to devices  ]   [ batch 3: to devices  ] ...
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from towers.custom_step import CustomStep
from towers.graph.repeatable import UNSAVED_NOISE
from towers.machine import hang, loss_internals
from towers.parallel.layers_ahead import Base, build, build_loss, track_outputs
from towers.parallel.requirements import explained
from towers.step import TowerStep, state as state_lib
from towers.step.checks import check_arrays, readable
from towers.step.compiled import COMPILED, losses
from towers.step.errors import NewestBatch, first_error, run_in_turn
from towers.step.gathering import NeedsOtherTowers
from towers.step.metrics import overrides, track_losses, update_metrics
from towers.step.prefetch import prefetched
from towers.step.structures import any_rows, batch_specs, components, map_tensors, packed
from towers.workers.watch import watched
from towers.workers.workers import Workers, join_workers


class PlacedBatches:
    """A train function for Keras' loop: takes an iterator and trains on its next batch."""

    def __init__(self, step: TowerStep, update: Callable[..., dict[str, tf.Tensor]]) -> None:
        """
        Args:
            step: the step that splits batches into shards.
            update: (x, y, sample_weight, placed) -> logs; it is traced by `tf.function`.
        """
        self._step, self._update = step, update
        self._functions: dict[str, Callable] = {}  # by the specs of a batch
        self._iterator: Any = None
        self._batches: Iterator[Any] = iter(())

    def __call__(self, iterator: Any) -> dict[str, tf.Tensor]:
        """Trains on the next batch and returns the logs.

        Raises:
            StopIteration: there is no next batch.
        """
        if iterator is not self._iterator:
            self._iterator = iterator
            self._batches = prefetched(self._step, map(_present, iterator), to_devices=True)
        batch = next(self._batches)
        values = batch.x, batch.y, getattr(batch, "sample_weight", None)
        specs = [map_tensors(any_rows, each) for each in (values, batch.placed)]
        if str(specs) not in self._functions:
            self._functions[str(specs)] = self._function(*specs)
        with watched(self._step.cluster, "a train step"), readable(), first_error(
            lambda: run_in_turn(self._step, "train", *values)
        ):
            return self._functions[str(specs)](*components([values, batch.placed]))

    def _function(self, *specs: Any) -> Callable[..., dict[str, tf.Tensor]]:
        """Returns `update` as a `tf.function` for these specs. Its trace may create metrics."""

        def train(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            given = iter(tensors)
            values, placed = (packed(each, given) for each in specs)
            return self._update(*values, placed)

        return tf.function(train, autograph=False, input_signature=components(list(specs)))

    def close(self) -> None:
        """Drops the iterator. A batch that was read ahead is lost."""
        self._iterator, self._batches = None, iter(())


def can_prefetch(step: TowerStep | None, steps_per_execution: int, data: Any) -> bool:
    """Returns whether `PlacedBatches` should replace Keras' training function.

    Args:
        step: the step that trains, or None before it exists.
        steps_per_execution: the model's value; only Keras' function makes several steps in a call.
        data: the argument of Keras' training function; `fit` passes a `tf.data.Iterator`.
    """
    if step is None or steps_per_execution > 1 or not isinstance(data, tf.data.Iterator):
        return False
    return step.policy.prefetch_to_devices


def close_batches(function: Any) -> None:
    """Closes the model's train function if it is a PlacedBatches."""
    if isinstance(function, PlacedBatches):
        function.close()


def _present(element: Any) -> Any:
    """Replaces the parts that Keras marks as absent by None."""
    return keras.tree.map_structure(
        lambda v: None if isinstance(v, tf.experimental.Optional) else v, element
    )


STATE = "parallel towers"  # an attribute of the model; its space avoids clashes with users' names


@dataclass
class Towers:
    """Holds the state of a ParallelModel, hidden from Keras' attribute tracking.

    base: the plain model, which is built first. devices: the names of the towers' devices.
    num_towers, batch_norm, strategy, gpus_per_tower, stages: the arguments of `make_parallel`.
    workers: the processes that call fit, evaluate and predict together.
    wants_eager: whether the model was compiled with run_eagerly=True.
    jit_compile: "auto", or COMPILED for the argument of the model's `compile`.
    step: runs Keras' default steps; made on the first batch after each `compile`, else None.
    custom_steps: the runner of each custom or gathering step, by "train", "test" or "predict".
    newest: the newest batch of each step; if a tower fails, all towers run on that batch again.
    """

    base: Base
    devices: list[str]
    num_towers: int
    batch_norm: str | None
    strategy: str
    gpus_per_tower: int
    stages: Sequence[str] | None
    workers: Workers
    wants_eager: bool = False
    jit_compile: str = COMPILED
    step: TowerStep | None = None
    custom_steps: dict[str, CustomStep] = field(default_factory=dict)
    newest: dict[str, NewestBatch] = field(
        default_factory=lambda: {name: NewestBatch() for name in ("train", "test", "predict")}
    )


def towers_of(model: keras.Model) -> Towers:
    """Returns the `Towers` of a parallel model."""
    return vars(model)[STATE]  # type: ignore[no-any-return]


def make_function(model: keras.Model, name: str, make: Callable, force: bool) -> None:
    """Makes Keras' function for step `name`, with a first call that creates all variables."""
    attribute = f"{name}_function"
    before = getattr(model, attribute)
    if force:  # the user has changed the model or its optimizer since `compile`
        towers_of(model).step, towers_of(model).custom_steps = None, {}
    told, model.jit_compile = model.jit_compile, False
    make(force)  # with XLA around the whole step, all towers would be on one device
    model.jit_compile = told
    function = getattr(model, attribute)
    if function is before:
        return

    def call(data: Any) -> Any:
        with watched(join_workers(), f"a {name} step"), readable(), first_error(
            functools.partial(_run_in_turn, model, name)
        ):
            return function(data)

    def first_call(data: Any) -> Any:
        preparing = hang.within(f"the first {name} step's making", is_patient=True)
        with preparing, explained(model.name, towers_of(model).wants_eager):
            data = _make_variables(model, name, data)
            setattr(model, attribute, call)
            if name == "train" and custom_step_of(model, name) is None and can_prefetch(
                towers_of(model).step, model.steps_per_execution, data
            ):
                step = _track_outputs(model, data.element_spec)
                setattr(model, attribute, PlacedBatches(step, functools.partial(update, model)))
            return getattr(model, attribute)(data)

    setattr(model, attribute, first_call)


def _run_in_turn(model: keras.Model, name: str) -> None:
    """Runs the towers one after the other on the newest batch, to raise the first error."""
    batch, step = towers_of(model).newest[name].read(), towers_of(model).step
    if batch is None:
        return
    own = towers_of(model).custom_steps.get(name)
    if own is not None:
        before = [(variable, variable.numpy()) for variable in own.variables]
        try:
            own(*batch)
        finally:
            for variable, value in before:
                variable.assign(value)
    elif step is not None:
        run_in_turn(step, name, *batch)


def run_step(model: keras.Model, name: str, data: Any) -> Any:
    """Runs one step in Keras' loop. Returns the logs, or the outputs for "predict"."""
    own = custom_step_of(model, name)
    if own is not None:
        with tf.control_dependencies(towers_of(model).newest[name].keep(data)):
            return own(data)
    x, y, sample_weight = batch = _parts(name, data)
    if name == "train":
        return update(model, *batch)
    with tf.control_dependencies(towers_of(model).newest[name].keep(*batch)):
        loss, y_pred = step_of(model, name, x).infer(name, batch)
    if name == "predict":
        return y_pred
    with tf.device(parameter_device_of(model)), tf.control_dependencies([loss]):
        track_losses(model, x, y, y_pred, sample_weight, training=False)
        return update_metrics(model, loss, x, y, y_pred, sample_weight)


def _parts(name: str, data: Any) -> tuple[Any, Any, Any]:
    """Splits a batch or its specs into x, y and sample_weight; only x is set for "predict"."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    return (x, None, None) if name == "predict" else (x, y, sample_weight)


def update(
    model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None, placed: Any = None
) -> dict[str, tf.Tensor]:
    """Makes one update and returns the logs. `placed`: the shards on their devices, or None."""
    step = step_of(model, "train", x)
    with tf.control_dependencies(towers_of(model).newest["train"].keep(x, y, sample_weight)):
        computed = step.compute((x, y, sample_weight), placed)
        y_pred = computed.predictions
        with tf.device(parameter_device_of(model)):
            track_losses(model, x, y, y_pred, sample_weight, training=True)
        loss = step.update(computed)
    with tf.device(parameter_device_of(model)), tf.control_dependencies([loss]):
        return update_metrics(model, loss, x, y, y_pred, sample_weight)


def _make_variables(model: keras.Model, name: str, data: Any) -> Any:
    """Creates all variables before Keras traces its function, which is then traced only once.

    Args:
        model: the parallel model.
        name: "train", "test" or "predict".
        data: the argument of Keras' function: an iterator over batches, or a list of batches.

    Returns:
        An iterator or a list with all batches of `data`, for Keras' function.
    """
    if isinstance(data, tf.data.Iterator):
        batch = data.element_spec
    elif isinstance(data, list):
        batch = data[0]
    else:
        batch = next(data)
        data = itertools.chain([batch], data)
    check_arrays(*keras.utils.unpack_x_y_sample_weight(batch))
    batch = batch_specs(batch)
    own = custom_step_of(model, name)
    if own is None:
        try:
            _trace_ahead(model, name, *_parts(name, batch))
        except NeedsOtherTowers:  # run Keras' step like a custom step
            own = _add_custom_step(model, name)
    if own is not None:
        own.prepare(batch)
    towers_of(model).newest[name].prepare(*(_parts(name, batch) if own is None else [batch]))
    return data


def prepare_training(model: keras.Model, specs: Any) -> list[keras.Variable]:
    """Creates all variables for these specs; returns those that Keras' lists may lack."""
    _make_variables(model, "train", [specs])
    own = custom_step_of(model, "train")
    if (own or step_of(model, "train", specs)).has_unsaved_noise:
        warnings.warn(UNSAVED_NOISE, stacklevel=2)
    if own is not None:
        return own.variables
    return _track_outputs(model, specs).unlisted_variables


def _track_outputs(model: keras.Model, specs: Any) -> TowerStep:
    """Creates the means of the outputs' losses, and returns the step that trains."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch_specs(specs))
    step = step_of(model, "train", x)
    y_pred = step.trace_tower("train", x, y, sample_weight)
    track_outputs(model, step.parameter_device, y, y_pred)
    return step


def _trace_ahead(model: keras.Model, name: str, x: Any, y: Any, sample_weight: Any) -> None:
    """Traces one tower, and builds Keras' metrics for its outputs."""
    if name != "predict":
        build_loss(model, towers_of(model).base, x, y, sample_weight)
    step = step_of(model, name, x)
    step.check_agreement()
    y_pred = step.trace_tower(name, x, y, sample_weight)
    metrics = None if name == "predict" else loss_internals.compiled_metrics(model)
    if metrics is not None and not metrics.built:
        with tf.device(step.parameter_device):
            metrics.build(y, y_pred)


def step_of(model: keras.Model, name: str, x: Any) -> TowerStep:
    """Returns the TowerStep. If Keras is tracing a graph, it is made outside of this graph.

    A step from `predict` or `evaluate` is not used to train: layers may be frozen since then.
    """
    step = towers_of(model).step
    if step is None or name == "train" and step.optimizer is not model.optimizer:
        with tf.init_scope():
            build(model, towers_of(model).base, x)
            step = towers_of(model).step = _make_step(model, name)
    return step


def custom_step_of(model: keras.Model, name: str) -> CustomStep | None:
    """Returns the runner of a custom or gathering step, or None if `TowerStep` runs the step."""
    towers = towers_of(model)
    if overrides(model, f"{name}_step") and name not in towers.custom_steps:
        _add_custom_step(model, name)
    return towers.custom_steps.get(name)


def _add_custom_step(model: keras.Model, name: str) -> CustomStep:
    towers = towers_of(model)
    if towers.strategy != "parameter_server" or towers.gpus_per_tower > 1:
        raise ValueError(
            f"model {model.name!r} needs the rows of all towers: it has a custom {name}_step, "
            "calls towers.gather, or has a loss that is neither a mean nor a sum over examples. "
            "Use strategy='parameter_server' and gpus_per_tower=1."
        )
    where = towers.devices, towers.num_towers, towers.batch_norm
    return towers.custom_steps.setdefault(name, CustomStep(model, f"{name}_step", *where))


def _make_step(model: keras.Model, name: str) -> TowerStep:
    loss, loss_weights = losses(model)
    jit_compile: bool | str = towers_of(model).jit_compile
    if not model.compiled:  # `predict` works without `compile`, as in Keras
        jit_compile = bool(model.jit_compile) and towers_of(model).gpus_per_tower == 1
    return TowerStep(
        model,
        model.optimizer if name == "train" else "sgd",  # this optimizer is never called
        loss,
        loss_weights=loss_weights,
        devices=towers_of(model).devices,
        num_towers=towers_of(model).num_towers,
        batch_norm=towers_of(model).batch_norm,
        strategy=towers_of(model).strategy,
        gpus_per_tower=towers_of(model).gpus_per_tower,
        stages=towers_of(model).stages,
        jit_compile=jit_compile,
    )


# Devices and options.


def parameter_device_of(model: keras.Model) -> str:
    if model.built:
        return state_lib.variables_device(model)
    return towers_of(model).base.parameter_device


def forget_functions(model: keras.Model) -> None:
    """Drops the functions and steps of an earlier `compile`, and turns run_eagerly off."""
    towers_of(model).wants_eager = bool(model.run_eagerly)
    if model.run_eagerly:
        warnings.warn(
            f"run_eagerly=True has no effect on parallel model {model.name!r}: towers are "
            "graphs. Debug the model itself, on one device.",
            stacklevel=3,
        )
    model.run_eagerly = False
    model.train_function = model.test_function = model.predict_function = None
    towers_of(model).step, towers_of(model).custom_steps = None, {}
