"""Calls what was traced once for each tower, on the tower's device: side by side, or in turn."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers.levels.cut import Piece
from towers.step import scopes


def run_on_devices(
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
        held: of each of T towers, the arguments without which it cannot begin.
        others: its other arguments.
        devices: of each tower, in contiguous ranges.
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
                first = _after(ends[device], first)
            results.append(function(first, *rest))
            if take_turns:
                ends[device] = _end(results[-1])
    return results


def run_piece(
    piece: Piece, towers: Sequence[dict[str, tf.Tensor]], devices: Sequence[str], *,
    take_turns: bool, first: int = 0,
) -> None:
    """Runs one level of a function that is cut, on every tower.

    Args:
        piece: the level.
        towers: what each of T towers has, by its name in the trace; gets the level's results.
        devices, take_turns: as for `run_on_devices`.
        first: the index of the first of them among the towers of all workers.
    """
    results = run_on_devices(
        piece.call,
        [[tower[name] for name in piece.inputs] for tower in towers],
        [(first + t,) for t in range(len(towers))],
        devices, take_turns=take_turns,
    )
    for tower, values in zip(towers, results, strict=True):
        tower.update(zip(piece.outputs, values, strict=True))


def _after(end: tf.Operation, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The values, not before another tower's end.

    The call itself could wait, too: but where TensorFlow inlines it, only what has no input waits.
    """
    with tf.control_dependencies([end]):
        return [tf.identity(value) for value in values]


def _end(result: Any) -> tf.Operation:
    """Comes after all numbers of a result: over identities, as inlining forgets who waits for a
    call."""
    tensors = [v for v in tf.nest.flatten(result, expand_composites=True) if v is not None]
    return tf.group([tf.identity(tensor) for tensor in tensors if tensor.dtype.is_floating])
