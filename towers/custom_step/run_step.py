"""Runs a step of the user's own on towers, level by level, in anybody's tf.function.

    shards, reads -> towers: level 0 -> collectives -> home: level 1, update -> towers: level 2 ...
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.graph.cut import Segment, cut
from towers.graph.repeatable import has_unsaved_noise
from towers.graph.tower_collectives import TowerCollective
from towers.machine import devices as devices_lib
from towers.machine.policy import Policy, policy_of
from towers.machine.tensorflow_internals import custom_gradients_forgotten
from towers.workers.workers import join_workers
from towers.custom_step.step_collectives import Update
from towers.custom_step.trace import Trace, trace_step
from towers.step import checks, scopes, sharding
from towers.step import state as state_lib
from towers.step import structures
from towers.step.averaging import add_tree, partial_sums
from towers.step.row_counts import checked_rows, gathered_rows_text
from towers.step.sharding import Shard
from towers.step.traced_tower import run_levels
from towers.step.transfers import move, spread


class Place(NamedTuple):
    """The devices of a step: one for each tower, and home, where the parameters are."""

    tower_devices: list[str]
    home: str
    policy: Policy


class _Cut(NamedTuple):
    """A traced step, and its segments by level: every tower's, and home's."""

    trace: Trace
    towers: dict[int, Segment]
    home: dict[int, Segment]

    @property
    def num_levels(self) -> int:
        """The number of levels, those with nothing but collectives and updates included."""
        events = [event.level for event in self.trace.events]
        return 1 + max([*self.towers, *self.home, *events], default=-1)


class OwnStep:
    """A model's own train_step, test_step or predict_step on towers."""

    def __init__(
        self,
        model: keras.Model,
        name: str,
        devices: Sequence[str],
        num_towers: int,
        batch_norm: str | None,
    ) -> None:
        """
        Args:
            model: whose step it is.
            name: of the method, data -> logs or predictions, of the model's class; Python runs it
                once for each structure of data. A tf.function is undone: the step is one anyway.
            devices, num_towers, batch_norm: as for `TowerStep`.

        Raises:
            ValueError: the model cannot be computed in towers.
        """
        checks.check_layers(model)
        checks.check_shared(model, num_towers)
        _check_alone(model, name)
        method = getattr(model.__class__, name)
        self._step = functools.partial(getattr(method, "python_function", method), model)
        policy = policy_of(devices)
        devices_lib.set_graph_optimizer(policy.optimize_graphs)
        self._model, self._batch_norm = model, batch_norm
        self._place = Place(
            devices_lib.place_towers(num_towers, devices), state_lib.variables_device(model), policy
        )
        self._cuts: dict[str, _Cut] = {}

    def __call__(self, data: Any) -> Any:
        """Runs the step on a global batch; returns its logs: means, and rows in order.

        Args:
            data: a structure of tensors [N, ...]; None stays None.

        Raises:
            ValueError: its parts differ in N, as far as that is known while this is traced.
        """
        prepared = self.prepare(data)
        is_usual = isinstance(data, tuple) and len(data) <= 3  # x, y, sample_weight
        with checked_rows(*(data if is_usual else [data])):
            return _Run(prepared, self._place, data).result()

    @property
    def variables(self) -> list[keras.Variable]:
        """All that the step has read or assigned, for any batch so far, each once; in order."""
        met: list[keras.Variable] = []
        for traced in self._cuts.values():
            updates = traced.trace.updates
            met += [variable for _, variable in traced.trace.reads]
            met += [v for u in updates for v in [*u.variables, *u.optimizer.variables]]
            met += [variable for variable, _ in traced.trace.assigned]
        return list({id(variable): variable for variable in met}.values())

    @property
    def has_unsaved_noise(self) -> bool:
        """Whether the step draws noise by tf.random, whose state nobody can save."""
        return any(
            has_unsaved_noise(traced.trace.function.graph.as_graph_def())
            for traced in self._cuts.values()
        )

    def prepare(self, data: Any) -> _Cut:
        """Traces the step, and makes the variables that it makes.

        Args:
            data: a batch, or the TensorSpecs of one.
        """
        specs = structures.batch_specs(data)
        key = str(specs)
        if key not in self._cuts:
            trace = trace_step(
                self._model, self._step, specs, home=self._place.home,
                batch_norm=self._batch_norm, is_alone=len(self._place.tower_devices) == 1,
            )
            met = [collective.inputs for collective in trace.collectives]
            updates = [(u.gradients, [v for _, v in u.assigned]) for u in trace.updates]
            left = [v for _, v in trace.assigned], trace.logs
            self._cuts[key] = _Cut(
                trace,
                cut(trace.function, trace.dependence, _tensors(met), effects=trace.effects),
                cut(trace.function, trace.dependence, _tensors([updates, left])),
            )
        return self._cuts[key]


def _check_alone(model: keras.Model, name: str) -> None:
    """Raises ValueError where several workers would run the step: they cannot meet yet."""
    num_workers = join_workers().num_workers
    if num_workers > 1:
        raise ValueError(
            f"model {model.name!r} needs the rows of all towers in its {name} (it is a custom "
            "step, calls towers.gather, or has a loss that is neither a mean nor a sum over "
            "examples). Towers meet within one process only, and the environment names "
            f"{num_workers} workers. Unset TF_CONFIG."
        )


class _Run:
    """One batch on its way through the levels: the values so far, by their names in the trace."""

    def __init__(self, step: _Cut, place: Place, data: Any) -> None:
        self._step, self._trace, self._place = step, step.trace, place
        with tf.name_scope(scopes.SPLIT), tf.device(devices_lib.HOST):
            self._shards = sharding.shard_batch(data, len(place.tower_devices))
            begins = tf.unstack(
                tf.cumsum([shard.size for shard in self._shards], exclusive=True),
                num=len(self._shards),
            )
        self._home = {inside.name: outside for outside, inside in self._trace.captured}
        self._towers = [
            {**self._home, **self._of_shard(shard, begin)}
            for shard, begin in zip(self._shards, begins, strict=True)
        ]
        with tf.name_scope(scopes.PARAMETERS):
            self._read(self._trace.reads)

    def result(self) -> Any:
        """Runs all levels; returns what the step returns."""
        run_levels(
            self._step.towers, self._step.num_levels, self._towers, self._place.tower_devices,
            self._end, take_turns=self._place.policy.take_turns,
        )
        with tf.device(self._place.home):
            logs = tf.nest.map_structure(
                self._at_home, self._trace.logs, expand_composites=True
            )
            for variable, value in self._trace.assigned:
                variable.assign(self._at_home(value))
        return logs

    def _of_shard(self, shard: Shard, begin: tf.Tensor) -> dict[str, tf.Tensor]:
        trace = self._trace
        leaves = structures.components(shard.values)
        names = [v.name for v in [*trace.leaves, trace.share, trace.begin]]
        return dict(zip(names, [*leaves, shard.share, begin], strict=True))

    def _read(self, reads: Sequence[tuple[tf.Tensor, keras.Variable]]) -> None:
        """Each variable once, for all; seeds anew for each tower."""
        place = self._place
        with tf.device(place.home):
            variables = list({id(variable): variable for _, variable in reads}.values())
            values = [tf.convert_to_tensor(variable.value) for variable in variables]
            arrived = spread(
                values, place.home, dict.fromkeys(place.tower_devices),
                packed=place.policy.pack_transfers,
            )
            index = {id(variable): i for i, variable in enumerate(variables)}
            for tensor, variable in reads:
                i = index[id(variable)]
                self._home[tensor.name] = values[i]
                for t, tower in enumerate(self._towers):
                    tower[tensor.name] = arrived[place.tower_devices[t]][i]
                    if tensor.name in self._trace.seeds:
                        (tower[tensor.name],) = state_lib.tower_seeds([values[i]], t)

    # A level's end.

    def _end(self, level: int) -> None:
        self._run_home(level)
        for event in self._trace.events:
            if event.level == level:
                self._run_event(event)

    def _run_home(self, level: int) -> None:
        segment = self._step.home.get(level)
        if segment is None:
            return
        with tf.device(self._place.home):
            values = segment.call([self._home[name] for name in segment.inputs])
        self._home.update(zip(segment.outputs, values, strict=True))

    def _run_event(self, event: TowerCollective | Update) -> None:
        if isinstance(event, Update):
            with tf.name_scope(scopes.UPDATE), tf.device(self._place.home):
                self._update(event)
            self._read(event.reads)
            return
        with tf.name_scope(scopes.SUM):
            met = self._outcome(event)
        for values in [self._home, *self._towers]:
            values.update(zip([v.name for v in event.outputs], met, strict=True))

    def _outcome(self, collective: TowerCollective) -> list[tf.Tensor]:
        values = [[tower[v.name] for v in collective.inputs] for tower in self._towers]
        place = self._place
        if collective.how == "first":
            return values[0]
        if collective.how == "sum":
            tree = partial_sums(
                values, place.tower_devices, add_on_devices=place.policy.add_on_devices,
                home=place.home, move=functools.partial(move, packed=place.policy.pack_transfers),
            )
            with tf.device(place.home):
                return add_tree(tree)
        with tf.device(place.home):
            if collective.how == "rows":
                rows = [structures.packed(collective.spec, iter(v)) for v in values]
                self._check_rows(rows, collective.line)
                return structures.components([sharding.concat_shards(rows, self._shards)])
            return [tf.concat(v, axis=0) for v in zip(*values)]

    def _check_rows(self, values: list[Any], line: str) -> None:
        """Asserts a row for each example, at home: of other devices only an error's end is told."""
        for rows, shard in zip(values, self._shards, strict=True):
            tf.debugging.assert_equal(
                sharding.batch_size([rows]), tf.maximum(shard.size, 1), gathered_rows_text(line)
            )

    def _update(self, update: Update) -> None:
        for variable, value in update.assigned:
            variable.assign(self._at_home(value))
        gradients = [self._at_home(gradient) for gradient in update.gradients]
        with custom_gradients_forgotten():
            update.optimizer.apply(gradients, update.variables)

    def _at_home(self, value: Any) -> Any:
        """The value, on the variables' device, of a traced tensor."""
        if isinstance(value, tf.IndexedSlices):
            shape = tf.constant(value.shape.as_list(), tf.int64)  # known while this is traced, too
            return tf.IndexedSlices(
                self._home[value.values.name], self._home[value.indices.name], shape
            )
        return self._home[value.name] if tf.is_symbolic_tensor(value) else value


def _tensors(structure: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [v for v in flat if tf.is_symbolic_tensor(v)]
