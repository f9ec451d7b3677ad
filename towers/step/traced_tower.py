"""A tower as it was traced, to be run on every shard: in one piece, or cut where towers meet.

    in one piece:  towers: the function
    cut:           towers: level 0 --> collective: sums over all towers --> towers: level 1 --> ...
    in stages:     see `pipeline`

A tower meets the others where its BatchNormalization is synchronized. Every level is called once
for each tower on its device; no tower waits for another inside of one.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from towers.graph.cut import Levels, Segment, captures, cut, effects_of
from towers.graph.merged import noise_keys_once, repeated_once
from towers.graph.repeatable import (
    draws_noise,
    has_unsaved_noise,
    is_repeatable,
    sums_in_order,
    warn_of_unordered_sums,
)
from towers.graph.stage_levels import StageLevels
from towers.graph.tower_collectives import TowerCollective, TowerCollectives
from towers.machine.tensorflow_internals import custom_gradients_forgotten
from towers.step.averaging import Values
from towers.step.calls import call_in_order, run_levels
from towers.step.pipeline import in_order
from towers.step.stages import Stages
from towers.step.structures import components, packed
from towers.step.tensor_rows import is_composite

_NOT_COMPILED = (
    "XLA does not compile the towers: a layer draws noise by tf.random, whose seeds it would "
    "ignore. Draw it by keras.random with a keras.random.SeedGenerator of the layer's own, or use "
    "jit_compile=False."
)


class TracedTower:
    """A traced method of a tower.

    function: the concrete function. structured_outputs: the function's.
    segments: what is called for each tower, by level.
    has_unsaved_noise: whether it draws noise by tf.random.
    """

    def __init__(
        self, function: Any, arguments: Sequence[tf.Tensor], levels: Levels | None = None,
        options: Mapping[str, Any] | None = None, collectives: Sequence[TowerCollective] = (),
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """
        Args:
            function: a concrete function. If it is cut, it is never called.
            arguments: its flat symbolic arguments.
            levels: of its tensors; None: it stays in one piece.
            options: of `tf.function`, for each segment.
            collectives: the sums over all towers in it.
            groups: the devices of each device group by its first, for a tower in stages.
        """
        self.function, self.structured_outputs = function, function.structured_outputs
        self.has_unsaved_noise = has_unsaved_noise(function.graph.as_graph_def())
        self._arguments = [v.name for v in arguments]
        self._collectives, self._groups = collectives, groups
        self._results = tf.nest.flatten(self.structured_outputs, expand_composites=True)
        wanted = [v for v in self._results if v is not None]
        if levels is None:
            self._captured: dict[str, Any] = {}
            self.segments = {0: self._in_one_piece([v.name for v in wanted])}
        else:
            self._captured = {inside.name: outside for outside, inside in captures(function)}
            wanted += [v for collective in collectives for v in collective.inputs]
            self.segments = cut(
                function, levels, wanted, effects=effects_of(function), options=options or {}
            )

    def _in_one_piece(self, outputs: list[str]) -> Segment:
        (specs, _), function = self.function.structured_input_signature, self.function

        def call(*values: tf.Tensor) -> list[tf.Tensor]:
            return components(function(*packed(specs, iter(values))))

        return Segment(self._arguments, outputs, lambda tower: call)

    def run(
        self,
        arguments: Sequence[Any],
        devices: Sequence[str],
        sum_towers: Callable[[list[Values]], Values],
        *,
        take_turns: bool,
        first: int = 0,
    ) -> list[Any]:
        """Runs the function for each tower; returns its results.

        Args:
            arguments: of each of this worker's towers: a TowerInput, and what else it takes.
            devices: of each; in stages the first of each tower's device group.
            sum_towers: V values of each -> V sums over all towers.
            take_turns, first: as for `call_in_order`.
        """
        towers = [
            {**self._captured, **dict(zip(self._arguments, components(given), strict=True))}
            for given in arguments
        ]

        def add_up(level: int) -> None:
            """Sums the towers' inputs of a level's collectives, all at once."""
            met = [collective for collective in self._collectives if collective.level == level]
            if met:
                names = [v.name for collective in met for v in collective.inputs]
                sums = sum_towers([[tower[name] for name in names] for tower in towers])
                outputs = [v.name for collective in met for v in collective.outputs]
                for tower in towers:
                    tower.update(zip(outputs, sums, strict=True))

        if self._groups is not None:
            order = in_order(self._groups, devices, sorted(self.segments))
            calls = [(t, self.segments[level], device) for t, level, device in order]
            call_in_order(calls, towers, take_turns=take_turns, first=first)
        else:
            num_levels = 1 + max([*self.segments, *(m.level for m in self._collectives)])
            run_levels(
                self.segments, num_levels, towers, devices, add_up,
                take_turns=take_turns, first=first,
            )
        flat = [[None if v is None else tower[v.name] for v in self._results] for tower in towers]
        outputs = self.structured_outputs
        return [tf.nest.pack_sequence_as(outputs, each, expand_composites=True) for each in flat]


def trace_tower(
    method: Callable, specs: Sequence[Any], options: Mapping[str, Any], *, meets: bool = False,
    stages: Stages | None = None, variables: Sequence[Any] = (),
) -> TracedTower:
    """Traces a method of a tower once, for all towers and all shard sizes.

    It stays in one piece where its towers do not meet, its layers are not in stages, and its graph
    is repeatable as it is. XLA does not compile what draws noise by tf.random, whose seeds it would
    ignore. It does not compile ragged or sparse rows either: it knows few of their operations, and
    would compile each number of entries anew.

    Args:
        method: of a tower.
        specs: of its arguments, structures; the first is a TowerInput.
        options: of `tf.function`, for the whole or for each segment.
        meets: whether the method takes `sum_towers`, which makes towers meet.
        stages: of the layers; None: a device computes them all.
        variables: whose values the TowerInput has: the parameters, then the state.
    """
    traced: list[tuple[Any, list[tf.Tensor], TowerCollectives]] = []
    if any(map(is_composite, tf.nest.flatten(specs))):
        options = {**options, "jit_compile": None}

    def body(*arguments: Any) -> Any:
        flat = components(arguments)
        collectives = TowerCollectives(flat)
        traced.append((arguments[0], flat, collectives))
        if meets:  # its collectives know their tensors: the sums are put in order as it is cut
            return method(*arguments, sum_towers=collectives.sum)
        with nullcontext() if stages is None else stages.scopes():
            results = method(*arguments)
        results = sums_in_order(collectives.graph, results)
        if options.get("jit_compile"):
            noise_keys_once(collectives.graph)
        return results if stages is not None else repeated_once(collectives.graph, results)

    body.__name__ = method.__name__  # by which the tower is found in graphs and profiles
    with custom_gradients_forgotten(), tf.device(None):
        function = tf.function(body, autograph=False, **options).get_concrete_function(*specs)
        warn_of_unordered_sums(function.graph)
        inputs, flat, collectives = traced[-1]
        captured = [inside for _, inside in captures(function)]
        if stages is not None:
            fed = dict.fromkeys([v.name for v in flat], stages.num_stages - 1)
            fed.update({v.name: 0 for v in [*components(inputs.x), *captured]})
            held = zip([*inputs.parameters, *inputs.state], stages.of(variables), strict=True)
            fed.update({v.name: stage for v, stage in held})
            levels = StageLevels(stages.num_stages, fed)
            return TracedTower(function, flat, levels, options, groups=stages.groups)
        definition = function.graph.as_graph_def()
        if options.get("jit_compile") and draws_noise(definition):
            warnings.warn(_NOT_COMPILED, stacklevel=2)
            return trace_tower(method, specs, {**options, "jit_compile": None}, meets=meets)
        if not meets and is_repeatable(definition):
            return TracedTower(function, flat)
        for inside in captured:
            collectives.dependence.feed(inside, local=False, level=0)
        return TracedTower(function, flat, collectives.dependence, options, collectives.events)
