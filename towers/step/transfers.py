"""Tensors that travel as one vector a dtype, instead of one by one.

    pack at the source: [a, b, c] -> one vector          unpack at the target: vector -> [a, b, c]

Each transfer has a cost of its own, which many small tensors pay many times; packing copies every
byte once more at both ends. Which is faster depends on the model and on the machine's bus.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

# Bytes. Packing copies a tensor twice; an exchange of its own between workers costs 1 to 2 ms
# (benchmarks/machines.py).
LARGE = 2 * 10**6


def move(values: list[Any], source: str, target: str, *, packed: bool) -> list[Any]:
    """Sends values to the target, bit for bit; unpacked, TensorFlow does so one by one.

    Args:
        values: tensors on the source, IndexedSlices or None; only tensors of fixed shapes are
            packed.
        source, target: device names.
        packed: whether they travel as one tensor a dtype.
    """
    if not packed or source == target:
        return values
    moved = list(values)
    for chosen, shapes in packages(values):
        with tf.device(source):
            vector = pack([values[i] for i in chosen])
        with tf.device(target):
            for i, part in zip(chosen, unpack(vector, shapes), strict=True):
                moved[i] = part
    return moved


def packages(
    values: Sequence[Any], large: float = float("inf")
) -> Iterator[tuple[list[int], list[tf.TensorShape]]]:
    """The packages that values travel in: the indices of each one's values, and their shapes.

    Args:
        values: tensors of fixed shapes; others are in no package.
        large: bytes from which on a tensor travels by itself; smaller ones share one a dtype.
    """
    found: dict[tuple[tf.DType, int | None], list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, tf.Tensor) and value.shape.is_fully_defined():
            is_large = value.shape.num_elements() * value.dtype.size >= large
            found.setdefault((value.dtype, i if is_large else None), []).append(i)
    for chosen in found.values():
        yield chosen, [values[i].shape for i in chosen]


def pack(values: Sequence[tf.Tensor], multiple: int = 1) -> tf.Tensor:
    """One vector of all values, padded with zeros to a size that `multiple` divides."""
    flat = [tf.reshape(value, [-1]) for value in values]
    missing = -sum(value.shape[0] for value in flat) % multiple
    return tf.concat([*flat, tf.zeros([missing], flat[0].dtype)] if missing else flat, axis=0)


def unpack(vector: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """The values of these shapes in a vector that `pack` made."""
    sizes = [shape.num_elements() for shape in shapes]
    missing = vector.shape[0] - sum(sizes)
    parts = tf.split(vector, [*sizes, missing] if missing else sizes)
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=False)]
