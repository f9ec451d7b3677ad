"""A tower as it was traced, to be run on every shard: whole, or cut where towers meet.

    whole:    towers: the function
    cut:      towers: level 0 --> collective: sums over all towers --> towers: level 1 --> ...

A tower meets the others where its BatchNormalization is synchronized. Every level is called once
for each tower on its device; no tower waits for another inside of one.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

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
from towers.graph.tower_collectives import TowerCollective, TowerCollectives
from towers.machine.tensorflow_internals import custom_gradients_forgotten
from towers.step.averaging import Values
from towers.step.calls import WholeTower, call_on_devices
from towers.step.tensor_rows import is_composite


class CutTower:
    """A traced function of a tower, in segments.

    function: the concrete function. structured_outputs: the function's.
    segments: by level.
    has_unsaved_noise: whether it draws noise by tf.random.
    """

    def __init__(
        self, function: Any, arguments: Sequence[tf.Tensor], levels: Levels,
        options: Mapping[str, Any], collectives: Sequence[TowerCollective] = (),
    ) -> None:
        """
        Args:
            function: a concrete function; it is cut up and never called.
            arguments: its flat symbolic arguments.
            levels: of its tensors.
            options: of `tf.function`, for each segment.
            collectives: the sums over all towers in it.
        """
        self.structured_outputs = function.structured_outputs
        self.function = function
        self.has_unsaved_noise = has_unsaved_noise(function.graph.as_graph_def())
        self._arguments = [v.name for v in arguments]
        self._captured = {inside.name: outside for outside, inside in captures(function)}
        self._collectives = collectives
        self._results = tf.nest.flatten(self.structured_outputs, expand_composites=True)
        wanted = [v for v in self._results if v is not None]
        wanted += [v for collective in collectives for v in collective.inputs]
        self.segments = cut(
            function, levels, wanted, effects=effects_of(function), options=options
        )
        self._num_levels = 1 + max([*self.segments, *(m.level for m in collectives)])

    def run(
        self,
        arguments: Sequence[Any],
        devices: Sequence[str],
        sum_towers: Callable[[list[Values]], Values],
        *,
        take_turns: bool,
        first: int = 0,
    ) -> list[Any]:
        """Runs the function for each tower; Args and Returns as of `WholeTower.run`."""
        towers = [self.begun(fed) for fed in arguments]
        run_levels(
            self.segments, self._num_levels, towers, devices,
            lambda level: self._add_up(level, towers, sum_towers),
            take_turns=take_turns, first=first,
        )
        return [self.packed(tower) for tower in towers]

    def begun(self, arguments: Any) -> dict[str, tf.Tensor]:
        """A tower's values as it begins, by their names in the trace."""
        return {**self._captured, **dict(zip(self._arguments, flat_of(arguments), strict=True))}

    def _add_up(
        self, level: int, towers: Sequence[dict[str, tf.Tensor]], sum_towers: Callable
    ) -> None:
        """Sums the towers' inputs of a level's collectives, all at once."""
        met = [collective for collective in self._collectives if collective.level == level]
        if met:
            names = [v.name for collective in met for v in collective.inputs]
            sums = sum_towers([[tower[name] for name in names] for tower in towers])
            outputs = [v.name for collective in met for v in collective.outputs]
            for tower in towers:
                tower.update(zip(outputs, sums, strict=True))

    def packed(self, tower: dict[str, tf.Tensor]) -> Any:
        flat = [None if v is None else tower[v.name] for v in self._results]
        return tf.nest.pack_sequence_as(self.structured_outputs, flat, expand_composites=True)


_NOT_COMPILED = (
    "XLA does not compile the towers: a layer draws noise by tf.random, whose seeds it would "
    "ignore. Draw it by keras.random with a keras.random.SeedGenerator of the layer's own, or use "
    "jit_compile=False."
)

TracedTower: TypeAlias = WholeTower | CutTower


def run_levels(
    segments: Mapping[int, Segment],
    num_levels: int,
    towers: Sequence[dict[str, tf.Tensor]],
    devices: Sequence[str],
    between: Callable[[int], None],
    *,
    take_turns: bool,
    first: int = 0,
) -> None:
    """Runs a function that is cut into levels, each on every tower before the next one.

    Args:
        segments: of the levels that towers have a part in.
        num_levels: L, levels without a segment included.
        towers: each of T towers' values by their names in the trace; gets each level's results.
        devices, take_turns: as for `call_on_devices`.
        between: called with 0 ... L - 1 at the end of each level, to run its collectives.
        first: the index of the first tower among the towers of all workers.
    """
    for level in range(num_levels):
        if level in segments:
            segment = segments[level]
            results = call_on_devices(
                segment.call,
                [[tower[name] for name in segment.inputs] for tower in towers],
                [(first + t,) for t in range(len(towers))],
                devices, take_turns=take_turns,
            )
            for tower, values in zip(towers, results, strict=True):
                tower.update(zip(segment.outputs, values, strict=True))
        between(level)


def flat_of(arguments: Any) -> list[tf.Tensor]:
    """The tensors of a structure, in order."""
    return [v for v in tf.nest.flatten(arguments, expand_composites=True) if v is not None]


def trace_tower(
    method: Callable, specs: Sequence[Any], options: Mapping[str, Any], *, meets: bool = False
) -> TracedTower:
    """Traces a method of a tower once, for all towers and all shard sizes.

    It stays whole where its towers do not meet and its graph is repeatable as it is. XLA does not
    compile what draws noise by tf.random, whose seeds it would ignore. It does not compile ragged
    or sparse rows either: it knows few of their operations, and would compile each number of
    entries anew.

    Args:
        method: of a tower.
        specs: of its arguments, structures.
        options: of `tf.function`, for the whole or for each segment.
        meets: whether the method takes `sum_towers`, which makes towers meet.
    """
    traced: list[tuple[list[tf.Tensor], TowerCollectives]] = []
    if any(map(is_composite, tf.nest.flatten(specs))):
        options = {**options, "jit_compile": None}

    def body(*arguments: Any) -> Any:
        flat = flat_of(arguments)
        collectives = TowerCollectives(flat)
        traced.append((flat, collectives))
        if meets:  # its collectives know their tensors: the sums are put in order as it is cut
            return method(*arguments, sum_towers=collectives.sum)
        graph = collectives.graph
        results = sums_in_order(graph, method(*arguments))
        if options.get("jit_compile"):
            noise_keys_once(graph)
        return repeated_once(graph, results)

    body.__name__ = method.__name__  # by which the tower is found in graphs and profiles
    with custom_gradients_forgotten(), tf.device(None):
        function = tf.function(body, autograph=False, **options).get_concrete_function(*specs)
        warn_of_unordered_sums(function.graph)
        definition = function.graph.as_graph_def()
        if options.get("jit_compile") and draws_noise(definition):
            warnings.warn(_NOT_COMPILED, stacklevel=2)
            return trace_tower(method, specs, {**options, "jit_compile": None}, meets=meets)
        if not meets and is_repeatable(definition):
            return WholeTower(function)
        flat, collectives = traced[-1]
        for _, inside in captures(function):
            collectives.dependence.feed(inside, local=False, level=0)
        return CutTower(function, flat, collectives.dependence, options, collectives.events)
