"""Traces a tower, and calls it for every shard on its tower's device: whole, or cut into levels.

    whole:      towers: the function
    cut:        towers: level 0 --> collective: sums over all towers --> towers: level 1 --> ...
    in stages:  `stages` orders the levels

Synchronized BatchNormalization and stages cut a tower. Within a level no tower waits for another,
unless the towers of a device take turns.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import tensorflow as tf

from towers.graph.cut import Segment, TowerCollective, TowerCollectives, cut
from towers.graph.levels import Dependence, StageLevels
from towers.graph.merged import compute_noise_keys_once, merge_repeats
from towers.graph.repeatable import (
    draws_noise, has_unsaved_noise, is_ordered, is_repeatable, sums_in_order,
    warn_of_unordered_sums,
)
from towers.machine.devices import HOST, is_gpu
from towers.machine.tensorflow_internals import (
    custom_gradients_forgotten, run_independently, without_xla,
)
from towers.machine.user_lines import warn_user
from towers.step.averaging import Values
from towers.step.stages import Stages, in_order
from towers.step.structures import components, is_composite, packed
from towers.step.xla import checks_of_kernels

NamedValues: TypeAlias = dict[str, tf.Tensor]  # one tower's tensors, by their names in the trace


def trace_tower(
    method: Callable, specs: Sequence[Any], options: Mapping[str, Any], *, meets: bool,
    stages: Stages | None = None, variables: Sequence[Any] = (),
) -> "TracedTower":
    """Traces a method of a tower once, for all towers and all shard sizes.

    The method stays in one piece if it needs no sums over towers, has no stages, and its graph is
    repeatable. XLA does not compile a method that draws noise with tf.random, because it would
    ignore the seeds. It does not compile ragged or sparse rows either: it supports few of their
    operations, and would compile again for each number of entries.

    specs: the specs of the method's arguments; the first is a TowerInput.
    options: keyword arguments of `tf.function`, for the whole or for each segment.
    meets: whether to pass the method `sum_towers`.
    variables: the variables whose values the TowerInput holds.
    """
    traced: list[tuple[Any, list[tf.Tensor], TowerCollectives]] = []
    checks: list[tf.Tensor] = []
    if any(map(is_composite, tf.nest.flatten(specs))):
        options = {**options, "jit_compile": None}

    def body(*arguments: Any) -> Any:
        flat = components(arguments)
        collectives = TowerCollectives(flat)
        traced.append((arguments[0], flat, collectives))
        if meets:  # no `sums_in_order`: collectives refer to these tensors, and `cut` orders sums
            return method(*arguments, sum_towers=collectives.sum)
        with nullcontext() if stages is None else stages.scopes():
            results = method(*arguments)
        results = sums_in_order(collectives.graph, results)
        if options.get("jit_compile"):
            compute_noise_keys_once(collectives.graph)
            checks[:] = checks_of_kernels(collectives.graph, components(arguments[0][2:]))
        return results if stages is not None else merge_repeats(results)

    body.__name__ = method.__name__  # the name that graphs and profiles show
    with custom_gradients_forgotten(), tf.device(None):
        function = tf.function(body, autograph=False, **options).get_concrete_function(*specs)
        warn_of_unordered_sums(function.graph)
        definition = function.graph.as_graph_def()
        if options.get("jit_compile") and draws_noise(definition):
            warn_user(
                "XLA does not compile the towers: a layer draws noise by tf.random, whose seeds it "
                "would ignore. Draw it with keras.random and a keras.random.SeedGenerator of the "
                "layer, or use jit_compile=False.",
            )
            return trace_tower(method, specs, {**options, "jit_compile": None}, meets=meets)
        inputs, flat, collectives = traced[-1]
        levels: Dependence | None = None
        captured = [inside for _, inside in function.graph.captures]
        if stages is not None:
            levels = StageLevels(stages.num_stages)
            held = zip([*inputs.parameters, *inputs.state], stages.of(variables), strict=True)
            first = [(v, 0) for v in [*components(inputs.x), *captured]]
            for v, stage in [*((v, stages.num_stages - 1) for v in flat), *first, *held]:
                levels.feed(v, local=True, level=stage)
        elif meets or not is_repeatable(definition):
            levels = collectives.dependence
            for inside in captured:
                levels.feed(inside, local=False, level=0)
        given = function, definition, flat, levels, options, checks
        return TracedTower(*given, collectives.events, None if stages is None else stages.groups)


class TracedTower:
    """Runs a traced method of a tower on every shard.

    segments: the part of the function that each level calls, by level.
    collectives: the sums over all towers between the levels.
    """

    def __init__(
        self, function: Any, definition: tf.compat.v1.GraphDef, arguments: Sequence[tf.Tensor],
        levels: Dependence | None, options: Mapping[str, Any], checks: Sequence[tf.Tensor],
        collectives: Sequence[TowerCollective], groups: Mapping[str, Sequence[str]] | None,
    ) -> None:
        """
        definition: the function's graph. arguments: its flat symbolic arguments.
        levels: the level of each tensor; None keeps the function in one piece.
        options: keyword arguments of `tf.function`, for the whole or for each segment.
        checks: scalar bools; XLA runs the calls of the towers for which all are true.
        groups: `Stages.groups`, if the levels are stages.
        """
        self.function, self.structured_outputs = function, function.structured_outputs
        self._arguments = [v.name for v in arguments]
        self.collectives, self._groups = collectives, groups
        self._results = tf.nest.flatten(self.structured_outputs, expand_composites=True)
        self._captured, self._definition = dict[str, Any](), definition
        self._is_compiled = bool(options.get("jit_compile"))
        wanted = [v for v in self._results if v is not None]
        self._checks = cut(function, Dependence(arguments), checks, with_effects=False).get(0)

        def call(*values: tf.Tensor) -> list[tf.Tensor]:
            specs, _ = function.structured_input_signature
            return components(function(*packed(specs, iter(values))))

        if levels is None:
            names = [v.name for v in wanted]
            ordered = is_ordered(definition)
            self.segments = {0: Segment(self._arguments, names, lambda tower: call, ordered)}
        else:
            self._captured = {inside.name: outside for outside, inside in function.graph.captures}
            wanted += [v for collective in collectives for v in collective.inputs]
            self.segments = cut(function, levels, wanted, options=options)

    @functools.cached_property
    def has_unsaved_noise(self) -> bool:
        """Whether the method draws noise with tf.random, whose state cannot be saved."""
        return has_unsaved_noise(self._definition)

    def run(
        self, arguments: Sequence[Any], devices: Sequence[str],
        sum_towers: Callable[[list[Values]], Values], *, compiled: Sequence[tf.Tensor] | None,
        **turns: Any,
    ) -> list[Any]:
        """Runs the function for each of this worker's towers; returns one result for each.

        arguments: for each tower, the method's arguments. devices: the device of each tower; in
        stages, the first device of its group. sum_towers: maps this worker's towers x V values to V
        sums over all towers. compiled, turns: as in `call_in_order`.
        """
        turns["compiled"] = compiled = compiled if self._is_compiled else None
        towers = [
            {**self._captured, **dict(zip(self._arguments, components(given), strict=True))}
            for given in arguments
        ]
        if compiled is not None and self._checks is not None and not any(map(is_gpu, devices)):
            checks = self._checks
            with tf.device(HOST):
                turns["compiled"] = [
                    tf.reduce_all([is_full, *checks.function_of(0)(*map(tower.get, checks.inputs))])
                    for is_full, tower in zip(compiled, towers, strict=True)
                ]

        def add_up(level: int) -> None:
            """Sums the inputs of a level's collectives over the towers, all at once."""
            met = [collective for collective in self.collectives if collective.level == level]
            if met:
                names = [v.name for collective in met for v in collective.inputs]
                sums = sum_towers([[tower[name] for name in names] for tower in towers])
                outputs = [v.name for collective in met for v in collective.outputs]
                for tower in towers:
                    tower.update(zip(outputs, sums, strict=True))

        if self._groups is not None:
            calls = in_order(self._groups, devices, sorted(self.segments))
            call_in_order(calls, self.segments, towers, **turns)
        else:
            num_levels = 1 + max([*self.segments, *(m.level for m in self.collectives)])
            run_levels(self.segments, num_levels, towers, devices, add_up, **turns)
        flat = [[None if v is None else tower[v.name] for v in self._results] for tower in towers]
        outputs = self.structured_outputs
        return [tf.nest.pack_sequence_as(outputs, each, expand_composites=True) for each in flat]


def run_levels(
    segments: Mapping[int, Segment], num_levels: int, towers: Sequence[NamedValues],
    devices: Sequence[str], between: Callable[[int], None], **turns: Any,
) -> None:
    """Runs a function that is cut into levels; all towers finish a level before the next begins.

    segments: by level; a level may have none. devices: the device of each tower; a device's towers
    are contiguous. between: called with 0 ... num_levels - 1 at the end of each level, to run its
    collectives. turns: `take_turns` and `first` of `call_in_order`.
    """
    for level in range(num_levels):
        if level in segments:
            calls = [(t, level, device) for t, device in enumerate(devices)]
            call_in_order(calls, segments, towers, **turns)
        between(level)


def call_in_order(
    calls: Iterable[tuple[int, int, str]], segments: Mapping[int, Segment],
    towers: Sequence[NamedValues], *, take_turns: bool, first: int = 0,
    compiled: Sequence[tf.Tensor] | None = None,
) -> None:
    """Calls segments for towers; adds the results to the towers' values.

    calls: (tower, level, device) tuples; a call follows the calls whose results it needs.
    take_turns: let a call wait for the previous call on the same device. Waiting for other devices,
        too, would run all towers one after another.
    first: the global index of this worker's first tower.
    compiled: for each tower, whether XLA runs its calls. None: it does if it compiles the segment.
    """
    ends: dict[str, tf.Operation] = {}  # by device: the end of its latest call
    for t, level, device in calls:
        segment = segments[level]
        with tf.name_scope(f"tower_{t}"), tf.device(device):
            values = [towers[t][name] for name in segment.inputs]
            if device in ends:
                # A control edge to the call is not enough: inlined, only ops without inputs wait.
                with tf.control_dependencies([ends[device]]):
                    values = [tf.identity(value) for value in values]
            call = functools.partial(segment.function_of(first + t), *values)
            plain, is_eager = functools.partial(without_xla, call), tf.executing_eagerly()
            if compiled is None:
                results = call()
            elif is_eager:
                results = tf.function(plain, autograph=False)()
            else:
                results = tf.cond(compiled[t], call, plain)
            if results and not (is_eager or segment.is_ordered):
                run_independently(results[0])
            if take_turns:
                # Wait for an operation: inlining drops control edges from a call.
                ends[device] = tf.group([tf.identity(v) for v in results if v.dtype.is_floating])
        towers[t].update(zip(segment.outputs, results, strict=True))
