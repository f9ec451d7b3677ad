"""Runs a custom step on towers, level by level, inside of any tf.function.

    shards, reads -> towers: level 0 -> collectives -> home: level 1, update -> towers: level 2 ...
"""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.custom_step.trace import Trace, trace_step
from towers.graph.cut import TowerCollective
from towers.graph.repeatable import has_unsaved_noise
from towers.machine import devices as devices_lib
from towers.machine.devices import Policy, policy_of
from towers.machine.tensorflow_internals import custom_gradients_forgotten
from towers.step import checks, sharding, state as state_lib, structures
from towers.step.averaging import add_tree
from towers.step.calls import run_levels
from towers.step.checks import GATHERED, checked_rows
from towers.step.exchange import Exchange, make_exchange
from towers.step.transfers import spread
from towers.workers.workers import join_workers


class CustomStep:
    """Runs a model's custom train_step, test_step or predict_step on towers."""

    def __init__(
        self, model: keras.Model, name: str, devices: Sequence[str], num_towers: int,
        batch_norm: str | None, own_rows: bool = False,
    ) -> None:
        """Raises ValueError if the model cannot be computed in towers.

        name: the name of the class's method, data -> logs or predictions. Python runs it once for
            each structure of data. Its tf.function is undone, as the step is traced anyway.
        own_rows: whether a worker has only the rows of its towers, and the first row.
        batch_norm: "average", "tower0", "synchronized", or None: average, with a warning.
        """
        checks.check_layers(model)
        checks.check_shared(model, num_towers)
        method = getattr(model.__class__, name)
        self._step = functools.partial(getattr(method, "python_function", method), model)
        self._policy = policy_of(devices)
        devices_lib.set_graph_optimizer(self._policy.optimize_graphs)
        self._model, self._batch_norm = model, batch_norm
        self._cluster, self._num_towers = join_workers(), num_towers
        self._exchange = make_exchange(self._cluster, num_towers, own_rows)
        self.is_alone = self._exchange.is_alone
        self._devices = devices_lib.place_towers(len(self._exchange.local_towers), devices)
        self._parameter_device = state_lib.variables_device(model)
        self._traces: dict[str, Trace] = {}

    def __call__(self, data: Any) -> Any:
        """Runs the step on a global batch; returns its logs: means, sums, or rows in order.

        `data` is a structure of tensors [N, ...] of any kind or None. If N is known to differ, it
        raises ValueError.
        """
        trace = self.prepare(data)
        is_usual = isinstance(data, tuple) and len(data) <= 3  # x, y, sample_weight
        with checked_rows(*(data if is_usual else [data])):
            where = self._devices, self._parameter_device, self._policy
            return _Run(trace, data, self._num_towers, self._exchange, *where).result()

    @property
    def variables(self) -> list[keras.Variable]:
        """Returns all variables that the step has read or assigned so far, each once, in order."""
        found: list[keras.Variable] = []
        for trace in self._traces.values():
            found += [variable for _, variable in trace.scope.reads]
            for update in trace.collectives.updates:
                found += [*update.variables, *update.optimizer.variables]
            found += [variable for variable, _ in trace.assigned]
        return list({id(variable): variable for variable in found}.values())

    @property
    def has_unsaved_noise(self) -> bool:
        """Returns whether the step draws noise by tf.random, whose state cannot be saved."""
        graphs = [trace.function.graph for trace in self._traces.values()]
        return any(has_unsaved_noise(graph.as_graph_def()) for graph in graphs)

    def prepare(self, data: Any) -> Trace:
        """Traces the step once for each structure of data: a global batch, or its TensorSpecs."""
        specs = structures.batch_specs(data)
        key = str(specs)
        if key not in self._traces:
            self._traces[key] = trace_step(
                self._model, self._step, specs, parameter_device=self._parameter_device,
                batch_norm=self._batch_norm, is_alone=self._num_towers == 1,
            )
        return self._traces[key]

    def check_agreement(self) -> None:
        """Raises ValueError if workers differ in versions, settings or the step's variables."""
        settings = {"num_towers": self._num_towers, "batch_norm": self._batch_norm or "average"}
        checks.check_agreement(self._cluster, self.variables, settings)


class _Run:
    """Runs the levels for one batch; holds the values so far, by their names in the trace."""

    def __init__(
        self, trace: Trace, data: Any, num_towers: int, exchange: Exchange, devices: Sequence[str],
        parameter_device: str, policy: Policy,
    ) -> None:
        """devices: one for each of this worker's towers. parameter_device: holds the variables."""
        self._trace, self._exchange, self._devices = trace, exchange, devices
        self._device, self._policy = parameter_device, policy
        with tf.name_scope(structures.SPLIT), tf.device(devices_lib.HOST):
            exchange.check_same_batch(data)
            self._shards = sharding.shard_batch(data, num_towers)
            sizes = [shard.size for shard in self._shards]
            begins = tf.unstack(tf.cumsum(sizes, exclusive=True), num=num_towers)
        self._values = trace.captured
        names = [v.name for v in trace.arguments]
        self._towers = []  # of this worker
        for t in exchange.local_towers:
            shard = self._shards[t]
            given = [*structures.components(shard.values), shard.share, begins[t]]
            self._towers.append({**self._values, **dict(zip(names, given, strict=True))})

    def result(self) -> Any:
        """Runs all levels; returns the step's logs for the global batch."""
        trace = self._trace
        with tf.name_scope(structures.PARAMETERS):
            self._read(trace.scope.reads)
        run_levels(
            trace.towers, trace.num_levels, self._towers, self._devices, self._end,
            take_turns=self._policy.take_turns, first=self._exchange.local_towers.start,
        )
        with tf.device(self._device):
            logs = tf.nest.map_structure(self._central_value, trace.logs, expand_composites=True)
            self._assign(trace.assigned)
        return logs

    def _read(self, reads: Sequence[tuple[tf.Tensor, keras.Variable]]) -> None:
        """Reads each variable once for all towers, but derives a seed for each tower."""
        with tf.device(self._device):
            variables = list({id(variable): variable for _, variable in reads}.values())
            values = [tf.convert_to_tensor(variable.value) for variable in variables]
            arrived = spread(
                values, self._device, dict.fromkeys(self._devices),
                packed=self._policy.pack_transfers,
            )
            index = {id(variable): i for i, variable in enumerate(variables)}
            for tensor, variable in reads:
                i = index[id(variable)]
                self._values[tensor.name] = values[i]
                towers = zip(self._exchange.local_towers, self._devices, self._towers, strict=True)
                for t, device, tower in towers:
                    tower[tensor.name] = arrived[device][i]
                    if state_lib.is_seed(variable):
                        (tower[tensor.name],) = state_lib.tower_seeds([values[i]], t)

    def _end(self, level: int) -> None:
        """Runs the segment of the parameter device, collectives and updates that end a level."""
        segment = self._trace.central_segments.get(level)
        if segment is not None:
            with tf.device(self._device):
                values = segment.function_of(0)(*(self._values[name] for name in segment.inputs))
            self._values.update(zip(segment.outputs, values, strict=True))
        for collective in self._trace.collectives_of(level):
            with tf.name_scope(structures.SUM):
                values = self._combine(collective)
            for tower in [self._values, *self._towers]:
                tower.update(zip([v.name for v in collective.outputs], values, strict=True))
        for update in self._trace.collectives.updates:
            if update.level == level:
                with tf.name_scope(structures.UPDATE), tf.device(self._device):
                    self._assign(update.assigned)
                    gradients = [self._central_value(gradient) for gradient in update.gradients]
                    with custom_gradients_forgotten():
                        update.optimizer.apply(gradients, update.variables)
                self._read(update.reads)

    def _combine(self, collective: TowerCollective) -> list[tf.Tensor]:
        values = [[tower[v.name] for v in collective.inputs] for tower in self._towers]
        with tf.device(self._device):
            if collective.how == "first":
                return list(self._exchange.broadcast(values[0]))
            if collective.how == "sum":
                return add_tree(self._exchange.reduce(
                    values, self._devices, add_on_devices=self._policy.add_on_devices,
                    parameter_device=self._device, packed=self._policy.pack_transfers,
                ))
            if collective.how == "join":
                return self._exchange.concat(values)
            rows = [structures.packed(collective.spec, iter(v)) for v in values]
            text = f"towers.gather, {collective.line}: {GATHERED}"
            # On the parameter device: an error of another device would lose its beginning.
            assertions = [
                tf.debugging.assert_equal(
                    sharding.batch_size([own]), tf.maximum(self._shards[t].size, 1), text
                ) for t, own in zip(self._exchange.local_towers, rows, strict=True)
            ]
            with tf.control_dependencies(assertions):
                return structures.components([self._exchange.rows(rows, self._shards)])

    def _assign(self, assigned: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
        for variable, value in assigned:
            variable.assign(self._central_value(value))

    def _central_value(self, value: Any) -> Any:
        """Returns the value of a traced tensor on the parameter device."""
        if isinstance(value, tf.IndexedSlices):
            shape = tf.constant(value.shape.as_list(), tf.int64)  # static, also in a trace
            return tf.IndexedSlices(
                self._values[value.values.name], self._values[value.indices.name], shape
            )
        return self._values[value.name] if tf.is_symbolic_tensor(value) else value
