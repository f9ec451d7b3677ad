"""Calls what was traced once for each tower, on the tower's device: side by side, or in turn."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from towers.graph.cut import Segment
from towers.step import scopes

Values: TypeAlias = dict[str, tf.Tensor]  # of one tower, by their names in the trace


def call_in_order(
    calls: Iterable[tuple[int, Segment, str]], towers: Sequence[Values], *, take_turns: bool,
    first: int = 0,
) -> None:
    """Calls segments for towers; adds the results to the towers' values.

    Args:
        calls: (tower, segment, device), each after those whose results it needs.
        towers: the values of T towers so far.
        take_turns: let a call wait for the one before it on the same device. Never for one on
            another device: their towers would wait for each other in a row.
        first: the index of the first tower among the towers of all workers.
    """
    ends: dict[str, tf.Operation] = {}  # by device: of its last call
    for t, segment, device in calls:
        with tf.name_scope(scopes.tower(t)), tf.device(device):
            values = [towers[t][name] for name in segment.inputs]
            if device in ends:
                values = _held_back(ends[device], values)
            results = segment.call(values, first + t)
            if take_turns:
                # An operation: inlining forgets who waits for a call.
                floats = [tf.identity(v) for v in results if v.dtype.is_floating]
                ends[device] = tf.group(floats)
        towers[t].update(zip(segment.outputs, results, strict=True))


def run_levels(
    segments: Mapping[int, Segment],
    num_levels: int,
    towers: Sequence[Values],
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
        towers, take_turns, first: as for `call_in_order`.
        devices: of each of the T towers, in contiguous ranges.
        between: called with 0 ... L - 1 at the end of each level, to run its collectives.
    """
    for level in range(num_levels):
        if level in segments:
            calls = [(t, segments[level], device) for t, device in enumerate(devices)]
            call_in_order(calls, towers, take_turns=take_turns, first=first)
        between(level)


def _held_back(end: tf.Operation, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The values, held back until another tower has ended.

    The call itself could wait, too: but where TensorFlow inlines it, only what has no input waits.
    """
    with tf.control_dependencies([end]):
        return [tf.identity(value) for value in values]
