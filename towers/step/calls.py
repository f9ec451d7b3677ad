"""Calls what was traced once for each tower, on the tower's device: side by side, or in turn."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers.graph.repeatable import has_unsaved_noise
from towers.step import scopes


class WholeTower:
    """A traced function of a tower that exchanges nothing with other towers while it runs.

    function: the concrete function. structured_outputs: the function's.
    has_unsaved_noise: whether it draws noise by tf.random.
    """

    def __init__(self, function: Any) -> None:
        """Args: function: a concrete function."""
        self.structured_outputs = function.structured_outputs
        self.function = function
        self.has_unsaved_noise = has_unsaved_noise(function.graph.as_graph_def())

    def run(
        self,
        arguments: Sequence[Any],
        devices: Sequence[str],
        sum_towers: Callable | None = None,
        *,
        take_turns: bool,
        first: int = 0,
    ) -> list[Any]:
        """Calls the function for each tower; returns its results.

        Args:
            arguments: of each of this worker's towers: a TowerInput, and what else it takes.
            devices: of each.
            sum_towers: V values of each -> V sums over all towers; for a tower that is cut.
            take_turns: as for `call_on_devices`.
            first: the index of the first of them among the towers of all workers; as sum_towers.
        """
        del sum_towers, first
        return call_on_devices(
            lambda parameters, fed, *others: self.function(
                fed._replace(parameters=parameters), *others
            ),
            [fed.parameters for fed, *_ in arguments], arguments, devices, take_turns=take_turns,
        )


def call_on_devices(
    function: Callable,
    held: Sequence[Sequence[tf.Tensor]],
    others: Sequence[Sequence[Any]],
    devices: Sequence[str],
    *,
    take_turns: bool,
) -> list[Any]:
    """Calls `function(held[t], *others[t])` on each tower's device.

    Args:
        function: traced without a device.
        held: for each of T towers, the arguments without which it cannot begin.
        others: for each tower, its other arguments.
        devices: the device of each tower, in contiguous ranges.
        take_turns: let a tower wait for the one before it on the same device. Never for one on
            another device: their towers would wait for each other in a row.

    Returns:
        The T results.
    """
    results: list[Any] = []
    ends: dict[str, tf.Operation] = {}  # by device: of its last tower
    for device, first, rest in zip(devices, held, others, strict=True):
        with tf.name_scope(scopes.tower(len(results))), tf.device(device):
            if device in ends:
                first = held_back(ends[device], first)
            results.append(function(first, *rest))
            if take_turns:
                ends[device] = end_of(results[-1])
    return results


def held_back(end: tf.Operation, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The values, held back until another tower has ended.

    The call itself could wait, too: but where TensorFlow inlines it, only what has no input waits.
    """
    with tf.control_dependencies([end]):
        return [tf.identity(value) for value in values]


def end_of(result: Any) -> tf.Operation:
    """Ends after all floats of a result, as an operation: inlining forgets who waits for a call."""
    tensors = [v for v in tf.nest.flatten(result, expand_composites=True) if v is not None]
    return tf.group([tf.identity(tensor) for tensor in tensors if tensor.dtype.is_floating])
