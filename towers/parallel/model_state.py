"""Holds the state of a parallel model: its towers, its steps, and layers that are not built yet."""

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import keras
import tensorflow as tf

from towers.divide.copies import Copies, NoCopies
from towers.divide.divided_step import DividedStep, method_of
from towers.divide.machines import Machine, make_machine
from towers.machine.devices import policy_of
from towers.machine.keras_internals import all_layers
from towers.machine.user_lines import warn_user
from towers.parallel.measuring_step import MeasuringStep
from towers.step import state as state_lib
from towers.step.compiled import COMPILED
from towers.step.errors import NewestBatch
from towers.step.exchange import make_exchange
from towers.step.metrics import call_compute_loss, overrides
from towers.step.placement import Placement
from towers.step.structures import Structure
from towers.step.xla import FullBatch, refuses_xla, uses_xla
from towers.workers.workers import Workers, join_workers

STATE = "parallel towers"  # an attribute of the model; its space avoids clashes with users' names
_ABSENT = object()  # marks a missing attribute; None may be a value


@dataclass
class Towers:
    """Holds the state of a ParallelModel, hidden from Keras' attribute tracking."""

    plain: keras.Model  # was given to `make_parallel`; both models share layers and variables
    unbuilt: Mapping[str, object]  # the attributes of `plain` before it was built, by name
    parameter_device: str  # to build layers on
    devices: list[str]
    num_towers: int
    placement: Placement
    own_rows: bool = False  # an argument of `TowerStep`
    workers: Workers = field(default_factory=join_workers)
    jit_compile: bool | str = COMPILED  # or "auto", False; COMPILED follows the model's `compile`
    noise_scale: bool = False  # whether the logs of `fit` get the gradient noise scale
    full_batch: FullBatch = field(default_factory=FullBatch)
    steps: dict[str, DividedStep] = field(default_factory=dict)  # by "train", ...
    measuring: MeasuringStep | None = None  # runs the "train" step with `noise_scale`
    machine: Machine | None = None  # where they run, but for XLA
    optimizer: keras.optimizers.Optimizer | None = None  # the one that `machine` is for
    warned_of_speed: bool = False  # what a divided step runs once takes time
    # The iterators of Keras' "train" and "test" loops.
    iterators: dict[str, tf.data.Iterator] = field(default_factory=dict)
    newest: dict[str, NewestBatch] = field(  # if a tower fails, all run on this batch again
        default_factory=lambda: {name: NewestBatch() for name in ("train", "test", "predict")}
    )

    @property
    def copies(self) -> Copies | NoCopies:
        """The copies of the parameters on the devices."""
        if self.machine is None:
            return NoCopies()
        return self.machine.copies


def towers_of(model: keras.Model) -> Towers:
    """Returns the `Towers` of a parallel model."""
    return vars(model)[STATE]  # type: ignore[no-any-return]


def drop_iterator(model: keras.Model, name: str) -> None:
    """Drops the iterator of Keras' loop for step `name`, if there is one, in a thread.

    Its destructor may wait for tf.data's autotuning: for as long as it lived, at most a minute.
    """
    held = [towers_of(model).iterators.pop(name, None)]  # no variable may refer to it
    threading.Thread(target=held.clear, daemon=True, name="towers-drop").start()


def parameter_device_of(model: keras.Model) -> str:
    """Returns the device of a parallel model's variables, or the one they will be made on."""
    if model.built:
        return state_lib.variables_device(model)
    return towers_of(model).parameter_device


def forget_functions(model: keras.Model) -> None:
    """Drops the functions and steps of an earlier `compile`, and turns run_eagerly off."""
    if model.run_eagerly:
        warn_user(
            f"run_eagerly=True has no effect on parallel model {model.name!r}: towers are "
            "graphs. Debug the model itself, on one device.",
        )
    model.run_eagerly = False
    model.train_function = model.test_function = model.predict_function = None
    forget_steps(model)


def forget_steps(model: keras.Model) -> None:
    """Drops the steps, because the model or its optimizer has changed."""
    towers = towers_of(model)
    towers.steps, towers.measuring, towers.machine = {}, None, None


def build(model: keras.Model, x: Structure, *loss_arguments: Structure) -> None:
    """Builds the layers that are not built yet, for specs of the inputs.

    With specs of y and sample_weight, it also builds layers that only `compute_loss` calls, such as
    the teacher in distillation.
    """
    towers = towers_of(model)
    with tf.init_scope(), tf.device(towers.parameter_device):
        if not _is_built(towers.plain):  # `build` of a subclassed model may leave layers unbuilt
            # Keras' symbolic tensors would not pass through a layer without shape inference.
            tf.function(towers.plain, autograph=False).get_concrete_function(x)
        if not model.built:
            take_over(model)
        if loss_arguments and overrides(model, "compute_loss") and not _is_built(model):

            def compute(x: Structure, y: Structure, sample_weight: Structure) -> tf.Tensor:
                return call_compute_loss(model, x, y, model(x, training=True), sample_weight, True)

            with suppress(Exception):  # the step raises the error again, with its line
                tf.function(compute, autograph=False).get_concrete_function(x, *loss_arguments)


def _is_built(model: keras.Model) -> bool:
    return all(layer.built for layer in all_layers(model))


def take_over(model: keras.Model) -> None:
    """Copies the attributes that `build` changed on the plain model, except those changed here too.

    An attribute that `build` made counts as changed even if it is None, as in `Dense.build`.
    """
    before, current = towers_of(model).unbuilt, vars(model)
    changed = {
        key: value
        for key, value in vars(towers_of(model).plain).items()
        if before.get(key, _ABSENT) is not value
        and before.get(key, _ABSENT) is current.get(key, _ABSENT)
        and not key.endswith("_function")
    }
    current.update(changed, built=True)


def step_of(model: keras.Model, name: str) -> DividedStep:
    """Returns the runner of a step: "train", "test" or "predict", Keras' own or a custom one."""
    towers = towers_of(model)
    if name not in towers.steps:
        with tf.init_scope():
            machine = _machine(model, name)
            if towers.noise_scale and name == "train":
                towers.measuring = MeasuringStep(model, machine)
                towers.steps[name] = towers.measuring.step
            else:
                step = method_of(model, f"{name}_step")
                towers.steps[name] = DividedStep(step, machine, model=model)
    return towers.steps[name]


def _machine(model: keras.Model, name: str) -> Machine:
    """Returns where a step runs, and what XLA compiles in it."""
    towers, optimizer = towers_of(model), getattr(model, "optimizer", None)
    if name == "train" and model.built and optimizer is not None and not optimizer.built:
        with tf.device(state_lib.variables_device(model)):  # else the step is traced twice
            optimizer.build(model.trainable_variables)
    if model.compiled:
        jit_compile = towers.jit_compile
    else:
        jit_compile = bool(model.jit_compile)
    compiles_update = not refuses_xla(model, jit_compile)
    machine = replace(_shared_machine(model), compiles_update=compiles_update)
    if overrides(model, f"{name}_step"):
        return machine
    has_stages = machine.stages is not None
    how = uses_xla(model, towers.devices, jit_compile, has_stages=has_stages)
    return machine.compiling(how, towers.full_batch, name)


def _shared_machine(model: keras.Model) -> Machine:
    """Returns where all steps run, with copies for the model's optimizer, if it is built."""
    towers = towers_of(model)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer = None
    if towers.machine is None or towers.optimizer is not optimizer:
        exchange = make_exchange(towers.workers, towers.num_towers, towers.own_rows)
        towers.optimizer = optimizer
        towers.machine = make_machine(
            model, optimizer, towers.devices, exchange, towers.placement,
            policy_of(towers.devices), parameter_device_of(model),
        )  # fmt: skip
    return towers.machine
