"""A tower whose layers are in stages, and the pipeline of a device group's towers through them.

    gpus_per_tower=3; F: forward pass, B: backward pass of a tower, both of them in the last stage

    stage 0   F0  F1  F2           B0  F3  B1      B2      B3
    stage 1       F0  F1      B0  F2  B1  F3  B2      B3
    stage 2           F0B0    F1B1    F2B2    F3B3

Stage s begins with S - s - 1 forward passes; then forward and backward passes take turns (1F1B of
PipeDream, Narayanan et al. 2019), so that it holds what S - s towers have computed at most.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers.graph.cut import captures
from towers.graph.repeatable import sums_in_order, warn_of_unordered_sums
from towers.graph.stage_levels import StageLevels
from towers.machine.tensorflow_internals import (
    custom_gradients_forgotten,
    custom_gradients_in_scope,
)
from towers.step import scopes
from towers.step.calls import end_of, held_back
from towers.step.stages import Stages
from towers.step.tower import Tower, TowerInput
from towers.step.traced_tower import CutTower, TracedTower, flat_of


class StagedTower(CutTower):
    """A traced function of a tower, in segments: of each stage, forward and backward."""

    def __init__(
        self, function: Any, arguments: Sequence[tf.Tensor], levels: StageLevels,
        options: Mapping[str, Any], groups: Mapping[str, Sequence[str]],
    ) -> None:
        """
        Args:
            function, arguments, options: as of `CutTower`.
            levels: S stages.
            groups: by its first device, the S devices of each device group.
        """
        super().__init__(function, arguments, levels, options)
        self._groups = groups

    def run(
        self, arguments: Sequence[Any], devices: Sequence[str], sum_towers: Any = None, *,
        take_turns: bool, first: int = 0,
    ) -> list[Any]:
        """Runs the function for each tower; Args and Returns as of `WholeTower.run`.

        Args:
            devices: the first of each tower's device group.
        """
        del sum_towers
        towers = [self.begun(fed) for fed in arguments]
        ends: dict[str, tf.Operation] = {}  # by device: of its last segment
        for t, level, device in self._in_order(devices):
            segment = self.segments[level]
            with tf.name_scope(scopes.tower(t)), tf.device(device):
                values = [towers[t][name] for name in segment.inputs]
                if device in ends:
                    values = held_back(ends[device], values)
                results = segment.call(values, first + t)
                if take_turns:
                    ends[device] = end_of(results)
            towers[t].update(zip(segment.outputs, results, strict=True))
        return [self.packed(tower) for tower in towers]

    def _in_order(self, devices: Sequence[str]) -> list[tuple[int, int, str]]:
        """(tower, level, device) of all segments: each after those that it waits for."""
        queues: dict[str, list[tuple[int, int]]] = {}
        for leader, group in self._groups.items():
            own = [t for t, device in enumerate(devices) if device == leader]
            for stage, device in enumerate(group):
                queues[device] = [
                    (own[t], level) for t, level in one_forward_one_backward(
                        stage, len(group), len(own)
                    ) if level in self.segments
                ]
        waiting = {t: sorted(self.segments) for t in range(len(devices))}
        order: list[tuple[int, int, str]] = []
        while any(queues.values()):
            for device, queue in queues.items():
                while queue and waiting[queue[0][0]][0] == queue[0][1]:
                    t, level = queue.pop(0)
                    waiting[t].pop(0)
                    order.append((t, level, device))
        return order


def one_forward_one_backward(
    stage: int, num_stages: int, num_towers: int
) -> list[tuple[int, int]]:
    """(tower, level) of all that a stage computes, in order; the last stage has one level."""
    last = 2 * (num_stages - 1)
    ahead = num_stages - 1 - stage
    forward = [(t, stage) for t in range(num_towers)]
    if not ahead:
        return forward
    backward = [(t, last - stage) for t in range(num_towers)]
    pairs = itertools.zip_longest(forward[ahead:], backward)
    return forward[:ahead] + [each for pair in pairs for each in pair if each is not None]


class TowerInStages(Tower):
    """A tower of which each method is traced once, and cut into its stages."""

    def __init__(self, stages: Stages, *args: Any, **kwargs: Any) -> None:
        """
        Args:
            stages: of the model.
            args, kwargs: as of `Tower`.

        Raises:
            ValueError: a layer's statistics are synchronized.
        """
        for layer in kwargs["synchronized_layers"]:
            raise ValueError(
                f"gpus_per_tower ({stages.num_stages}) does not go with layer {layer.name!r}, a "
                "BatchNormalization with synchronized=True: towers would wait for each other "
                "within a stage. Use synchronized=False, or gpus_per_tower=1."
            )
        super().__init__(*args, **kwargs)
        self._stages = stages

    def _trace_method(
        self, method: Callable, arguments: Sequence[Any], *, meets: bool
    ) -> TracedTower:
        assert not meets
        last = self._stages.num_stages - 1
        flat: list[tf.Tensor] = []
        fed: dict[str, int] = {}

        def body(inputs: TowerInput, *others: Any) -> Any:
            flat[:] = flat_of([inputs, *others])
            fed.update({v.name: last for v in flat})
            fed.update({v.name: 0 for v in flat_of(inputs.x)})
            variables = self._stages.of([*self.trainable, *self.state])
            held = zip([*inputs.parameters, *inputs.state], variables)
            fed.update({v.name: stage for v, stage in held})
            with self._stages.scopes(), custom_gradients_in_scope():
                results = method(inputs, *others)
            return sums_in_order(tf.compat.v1.get_default_graph(), results)

        body.__name__ = method.__name__
        with custom_gradients_forgotten(), tf.device(None):
            function = tf.function(body, autograph=False, **self.options)
            traced = function.get_concrete_function(*arguments)
            warn_of_unordered_sums(traced.graph)
            fed.update({inside.name: 0 for _, inside in captures(traced)})
            levels = StageLevels(last + 1, fed)
            return StagedTower(traced, flat, levels, self.options, self._stages.groups)
