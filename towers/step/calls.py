"""Calls the traced segments for each tower, on the tower's device: concurrently, or in turn."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from towers.graph.cut import Segment

Values: TypeAlias = dict[str, tf.Tensor]  # one tower's tensors, keyed by their name in the trace


def call_in_order(
    calls: Iterable[tuple[int, Segment, str]], towers: Sequence[Values], *, take_turns: bool,
    first: int = 0,
) -> None:
    """Calls segments for towers; adds the results to the towers' values.

    Args:
        calls: (tower, segment, device) tuples; a call follows the calls whose results it needs.
        towers: the values of this worker's towers so far.
        take_turns: let a call wait for the previous call on the same device. Waiting for other
            devices, too, would run all towers one after another.
        first: the global index of this worker's first tower.
    """
    ends: dict[str, tf.Operation] = {}  # by device: the end of its latest call
    for t, segment, device in calls:
        with tf.name_scope(f"tower_{t}"), tf.device(device):
            values = [towers[t][name] for name in segment.inputs]
            if device in ends:
                # A control edge to the call is not enough: inlined, only ops without inputs wait.
                with tf.control_dependencies([ends[device]]):
                    values = [tf.identity(value) for value in values]
            results = segment.function_of(first + t)(*values)
            if take_turns:
                # Wait for an operation: inlining drops control edges from a call.
                ends[device] = tf.group([tf.identity(v) for v in results if v.dtype.is_floating])
        towers[t].update(zip(segment.outputs, results, strict=True))


def run_levels(
    segments: Mapping[int, Segment], num_levels: int, towers: Sequence[Values],
    devices: Sequence[str], between: Callable[[int], None], **turns: Any,
) -> None:
    """Runs a function that is cut into levels; all towers finish a level before the next begins.

    Args:
        segments: the segment of each level, by level; a level may have none.
        num_levels: L, levels without a segment included.
        devices: the device of each tower; a device's towers are contiguous.
        between: called with 0 ... L - 1 at the end of each level, to run its collectives.
        towers, turns: the arguments of `call_in_order`.
    """
    for level in range(num_levels):
        if level in segments:
            calls = [(t, segments[level], device) for t, device in enumerate(devices)]
            call_in_order(calls, towers, **turns)
        between(level)
