"""Trains a model in a custom loop, on a step that is traced once and divided among towers."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from towers.divide.keras_steps import KerasSteps
from towers.divide.machines import Machine, make_machine
from towers.divide.phases import Phases, phases_of
from towers.divide.ran_once import RanOnce, warn_of
from towers.divide.tower_results import error_of
from towers.divide.trainable_flags import TrainableFlags
from towers.divide.twin import twin_of
from towers.machine import choices, devices as devices_lib, hang
from towers.machine.argument_names import names_checked
from towers.machine.devices import HOST, Policy, policy_of
from towers.machine.logical import undivided_cpu
from towers.machine.user_lines import warn_user
from towers.step import checks
from towers.step.averaging import Values
from towers.step.compiled import COMPILED
from towers.step.errors import first_error
from towers.step.exchange import make_exchange
from towers.step.metrics import BatchMetrics
from towers.step.noise_scale import NoiseMetric
from towers.step.placement import Placement
from towers.step.raw_variables import RawVariable
from towers.step.sharding import BatchValues, Placed, rows_of_towers
from towers.step.state import variables_device
from towers.step.structures import Structure, any_rows, as_tensor, map_tensors
from towers.step.xla import FullBatch, refuses_xla, uses_xla
from towers.workers.watch import watched
from towers.workers.workers import Workers, join_workers


class TowerStep:
    """Trains a Keras model with towers in a custom loop.

    ```python
    step = towers.TowerStep(model, "adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    logs = step(x, y)  # makes one update; returns this batch's loss and accuracy
    ```

    The parameters stay on the device on which they were created. The optimizer, and the variables
    that are trainable when the step is made, are fixed: to change them, make a new step.

    traces: the functions of steps in the order of their traces; each takes any number of rows.

    Args:
        model: a built Keras 3 model.
        optimizer: a Keras optimizer or its name. It is called once for each update, with the
            gradients of the whole batch.
        loss: a Keras loss, its name, a function, or a list or dict of these; None if layers add
            every loss. A compiled model brings its optimizer, loss, loss weights and metrics.
        loss_weights: a factor, or a list or dict with a factor for each output.
        metrics: Keras metrics in any form that `compile` takes.
        devices: the names of this process's devices. Default: `tower_devices()`.
        num_towers: the number of towers of all workers together. Default: one for each device.
        batch_norm: the rows of BatchNormalization's mean and variance in training. By default,
            and with "synchronized", they are the whole batch, as on one device. With "average"
            and "tower0", they are the tower's rows, and the moving averages follow the average
            over the towers, weighted by rows, or tower 0.
        nonfinite: the reaction to a NaN or infinite loss or gradient. "apply" updates, as Keras
            does. "stop" raises `NonFiniteError` before the update. "skip" leaves the update out
            and does not count it in `optimizer.iterations`. A `LossScaleOptimizer` checks its
            gradients itself.
        jit_compile: whether XLA compiles what towers compute between two meetings. "auto"
            follows `model.jit_compile`, and compiles small recurrent layers on machines without
            GPUs. "compiled" only follows `model.jit_compile`. It equals "auto" for a model that
            is not compiled, or whose value is the one that Keras chooses for "auto". False
            also keeps XLA from the update.
        batch_size: the number of examples in a full batch. XLA compiles only the towers of full
            batches. Default: each batch is a full one.
        strategy: "parameter_server" keeps the parameters on one device, and "mirrored" keeps a
            copy on every tower device, which makes the same update. With "sharded", each device
            owns some parameters: it keeps their slots, updates them and sends them to the
            others. All give the same bits.
        gpus_per_tower: the number of devices that share the layers of one tower, in as many
            stages. Any number gives the same bits.
        stages: the names of the layers that begin the second and later stages. Default: stages
            are balanced by the bytes of parameters and outputs.
        towers_per_device: the number of towers on each device, such as [3, 1] if the first one is
            three times as fast; with stages, on each group of devices. Any numbers with the same
            sum give the same bits. Default: equal numbers.
        add_on: the devices that add the towers' gradients and other sums. "auto" adds on GPUs if
            towers run there. "cpu" adds on the CPU alone, and devices send nothing to each other,
            which helps if a link between them fails. Both give the same bits, except in sums of
            denormal numbers (below 1e-38), which CPUs and GPUs treat differently.
        policy: how devices are used. Default: the policy for their kind, CPU or GPU.
        cluster: the workers that share the towers. Each makes the same step and passes the same
            global batches. Default: the workers that the environment names.
        own_rows: whether each of several workers passes only its own rows of x, y and
            sample_weight. For N examples, `step.own_rows(N)` returns bool [N], true for the
            examples of the worker's towers and for the first example. The other rows may hold
            anything, such as zeros. Workers compare N and the first example.
        noise_scale: whether `train_batch` also returns "noise_scale", the batch size beyond
            which most examples are wasted, estimated since `reset_metrics`. It needs two
            towers. The weights keep their bits. The first 10 steps are measured, and then
            every 20th step, which has its own trace. A gradient that was computed once, from
            the rows of all towers, does not count.

    Raises:
        ValueError: an argument is wrong, a device does not exist, or the model is not built.
    """

    @names_checked
    def __init__(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer | str = COMPILED,
        loss: object = COMPILED, *, loss_weights: object = None, metrics: object = None,
        devices: Sequence[str] | None = None, num_towers: int | None = None,
        batch_norm: str | None = None, nonfinite: str = "apply",
        jit_compile: bool | str = COMPILED, strategy: str = "parameter_server",
        gpus_per_tower: int = 1, stages: Sequence[str] | None = None,
        towers_per_device: Sequence[int] | None = None, add_on: str = "auto",
        policy: Policy | None = None, cluster: Workers | None = None, noise_scale: bool = False,
        own_rows: bool = False, batch_size: int | None = None,
    ) -> None:  # fmt: skip
        checks.check_model(model)
        checks.check_choice("nonfinite", nonfinite, choices.NONFINITE)
        placement = Placement(
            strategy, gpus_per_tower, stages, batch_norm or "synchronized", towers_per_device,
            add_on,
        )  # fmt: skip
        placement.check_jit_compile(jit_compile)
        self.devices = devices_lib.device_list(devices)
        devices_lib.check_devices(self.devices)
        num_groups = placement.num_groups(len(self.devices))
        self.cluster = join_workers() if cluster is None else cluster
        is_chosen = num_towers is not None
        if num_towers is None:
            num_towers = self.cluster.num_workers * placement.num_towers(num_groups)
        checks.check_counts(num_towers, batch_size, noise_scale)
        exchange = make_exchange(self.cluster, num_towers, own_rows)
        self.num_towers, self.local_towers = num_towers, exchange.local_towers
        if devices is None and (shared := undivided_cpu(len(self.local_towers), is_chosen)):
            warn_user(shared)
        self.parameter_device = variables_device(model)
        self._twin = twin_of(model, optimizer, loss, loss_weights, metrics)
        self.machine = make_machine(
            model, self.optimizer, self.devices, exchange, placement,
            policy_of(self.devices) if policy is None else policy, self.parameter_device,
        )  # fmt: skip
        compiles_update = not refuses_xla(model, jit_compile)
        self.machine = replace(self.machine, compiles_update=compiles_update)
        self.policy = self.machine.policy
        self.tower_devices, self.stages = self.machine.devices, self.machine.stages
        self.strategy = self.machine.copies
        self.uses_xla = uses_xla(
            model, self.devices, jit_compile, has_stages=self.stages is not None, twin=self._twin
        )
        find_rows = functools.partial(rows_of_towers, num_towers, self.local_towers)
        self.own_rows = find_rows if own_rows else None  # N -> bool [N]
        self.model, self.nonfinite, self.batch_norm = model, nonfinite, placement.batch_norm
        self._num_rows = batch_size or 1  # of the newest batch
        self.metrics = BatchMetrics(self._twin, self.parameter_device)
        self.trainable_variables = list(model.trainable_variables)
        self._flags = TrainableFlags(model)
        with tf.device(self.parameter_device):
            self.noise = NoiseMetric() if noise_scale else None
        self.full_batch = FullBatch(batch_size)
        self.steps = KerasSteps(
            self._twin, self.trainable_variables, self._machine, nonfinite=nonfinite,
            noise=self.noise, metrics=self.metrics,
        )  # fmt: skip
        self._functions: dict[str, Callable] = {}  # by method and the batch's structure
        self.traces: list[tf.types.experimental.ConcreteFunction] = []

    def _machine(self, name: str) -> Machine:
        return self.machine.compiling(self.uses_xla, self.full_batch, name)

    def __call__(
        self, x: Structure, y: Structure = None, sample_weight: Structure = None
    ) -> dict[str, tf.Tensor]:
        """Makes one synchronous update.

        Args:
            x: inputs of the global batch: a tensor or array [N, ...], or a structure of these.
            y: labels [N, ...]; for several outputs, a list, tuple or dict of these.
            sample_weight: weights [N] or [N, ...]; for several outputs, a list, tuple or dict of
                these.

        Returns:
            {"loss": scalar, metric name: scalar}, computed from this batch alone.
        """
        checks.check_rows(x, y, sample_weight)
        self.reset_metrics()
        return self.train_batch(x, y, sample_weight)

    def train_batch(
        self,
        x: Structure,
        y: Structure = None,
        sample_weight: Structure = None,
        placed: Placed = None,
    ) -> dict[str, tf.Tensor]:
        """Makes one synchronous update.

        Args:
            x, y, sample_weight: the global batch, in the forms that a call of the step takes.
            placed: the shards on their devices, from `towers.prefetched`; None splits the batch.

        Returns:
            {"loss": scalar, metric name: scalar}: running means since `reset_metrics`.

        Raises:
            NonFiniteError: with nonfinite="stop", a loss or gradient is NaN or infinite. Nothing
                has changed.
            ValueError: x, y and sample_weight have different numbers of rows. Nothing has changed.
        """
        logs, finite = self._run("train", (x, y, sample_weight), placed)
        if self.nonfinite == "stop" and finite is not None and not finite.numpy().all():
            towers = self._run("diagnosis", (x, y, sample_weight)).numpy()
            places = self.machine.exchange.places(self.tower_devices)
            raise error_of(finite.numpy(), towers, places, self.trainable_variables)
        return logs

    def test_batch(
        self,
        x: Structure,
        y: Structure = None,
        sample_weight: Structure = None,
        placed: Placed = None,
    ) -> dict[str, tf.Tensor]:
        """Computes loss and metrics in inference mode; arguments and result as in `train_batch`."""
        return self._run("test", (x, y, sample_weight), placed)

    def predict_batch(self, x: Structure) -> Any:
        """Returns the model's outputs for one global batch, with rows in the order of the batch."""
        return self._run("predict", (x, None, None))

    def gradients(
        self, x: Structure, y: Structure = None, sample_weight: Structure = None
    ) -> tuple[tf.Tensor, Values]:
        """Computes the gradients of the whole batch without an update.

        Changes no variable, no state and no seed. A loss scale is not applied.

        Returns:
            (loss, [gradient]), with the gradients in the order of `trainable_variables`.
        """
        return self._run("gradients", (x, y, sample_weight))

    def reset_metrics(self) -> None:
        """Restarts the running means of the loss and the metrics."""
        self.metrics.reset()
        if self.noise is not None:
            self.noise.reset_state()

    @property
    def metrics_variables(self) -> list[keras.Variable]:
        """The running sums of the loss and the metrics, and the `unlisted_variables`."""
        noise = self.noise.variables if self.noise is not None else []
        found = [*self.metrics.variables, *self.unlisted_variables, *noise]
        return list({id(v): v for v in found}.values())

    @property
    def unlisted_variables(self) -> list[RawVariable]:
        """Returns variables that the model uses but Keras does not list; found while tracing."""
        listed = [*self.model.variables, *self.optimizer.variables, *self.metrics.variables]
        return self.steps.divided["train"].unlisted(listed)

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer of the update; make a new step for another one."""
        return self._twin.optimizer

    @property
    def has_unsaved_noise(self) -> bool:
        """Whether a traced step draws noise with tf.random, whose state cannot be saved."""
        return any(step.has_unsaved_noise for step in self.steps.divided.values())

    @property
    def ran_once(self) -> list[RanOnce]:
        """The operations that an update runs once, although they have rows of the batch.

        They are in the form of `towers.ran_once`, and describe the update that was traced last.
        """
        return self.steps.divided["train"].ran_once(self._num_rows)

    def check_agreement(self) -> None:
        """Raises ValueError if workers differ in versions, settings or variables."""
        self.steps.divided["train"].check_agreement()

    def build_metrics(
        self, name: str, x: Structure, y: Structure, sample_weight: Structure = None
    ) -> None:
        """Makes `metrics_variables`, as the first batch does; name: "train" or "test"."""
        self._prepare(name, map_tensors(any_rows, (x, y, sample_weight)))

    def graph_of_update(self, *specs: Structure) -> tf.Graph:
        """Returns the graph of an update of a batch of these specs, as --plan reads it."""
        self._prepare("train", map_tensors(any_rows, specs))
        update = tf.function(self.steps.train, autograph=False)
        return update.get_concrete_function(specs, None).graph

    def phases(self) -> Phases:
        """Returns the operations of the update traced last, by phase: towers have the even ones."""
        _, divided = list(self.steps.divided["train"].traces.values())[-1]
        return phases_of(divided.ops)

    def _run(self, name: str, batch: BatchValues, placed: Placed = None) -> Any:
        """Returns the result of a method of `KerasSteps`, computed by its graph.

        The graph is traced once for batches of one structure, whatever their number of rows.
        """
        checks.check_placed(placed, batch[0], self.num_towers, self.local_towers)
        checks.check_arrays(*batch)
        with tf.device(HOST):  # otherwise the whole batch would go to the first GPU
            tensors = map_tensors(as_tensor, batch)
        checks.check_rows(*tensors)
        self._num_rows = next(v for v in tf.nest.flatten(tensors) if v is not None).shape[0]
        if self._num_rows == 0:
            raise ValueError("the global batch has no examples.")
        # tf.random would begin again in a second function, so a model that uses it has one.
        is_measured = name == "train" and self.noise is not None and (
            self.has_unsaved_noise or self.noise.is_due(self.optimizer)
        )  # fmt: skip
        if name in ("train", "gradients"):
            self._flags.warn_of_changes()
        specs = map_tensors(any_rows, tensors)  # an uneven last batch needs no other trace
        # The specs of `placed` follow from the batch's.
        key, phase = f"{name} {is_measured} {specs} {placed is None}", f"a {name} step"
        if key not in self._functions:
            with hang.tracing(f"the trace of {phase}"):
                if not self.traces:
                    self.check_agreement()
                self._prepare(name, specs)
                method = "train_measured" if is_measured else name
                function = tf.function(getattr(self.steps, method), autograph=False)
                traced = function.get_concrete_function(specs, map_tensors(any_rows, placed))
            self._functions[key] = traced
            self.traces.append(traced)
            if name == "train" and self.num_towers > 1:
                warn_of(self.ran_once, self.model.name, "step.ran_once")
        # The step of the gradients makes no update.
        alone = self.steps.divided["gradients" if name in ("train", "diagnosis") else name]
        undivided = functools.partial(alone.run_undivided, tensors)
        with watched(self.cluster, phase), first_error(undivided):
            return self._functions[key](tensors, placed)

    def _prepare(self, name: str, specs: Structure) -> None:
        """Traces a step of Keras for specs of a batch, with the first `trainable` flags."""
        with self._flags.as_made():
            self.steps.prepare(name, specs)
