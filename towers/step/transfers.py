"""Sends small tensors as one vector for each dtype, instead of one by one.

    pack at the source: [a, b, c] -> one vector          unpack at the target: vector -> [a, b, c]

Each transfer has a fixed cost, which adds up for many small tensors. Packing copies every byte once
more at both ends, so large tensors are sent separately.
"""

from collections.abc import Iterable, Sequence

import tensorflow as tf

# In bytes. Packing copies a tensor twice; a separate exchange between workers costs 1 to 2 ms
# (benchmarks/exchange.py).
LARGE = 2 * 10**6


def transfer(
    values: Sequence[tf.Tensor], source: str, target: str, *, packed: bool
) -> list[tf.Tensor]:
    """Sends values from a source to one target device, bit for bit, like `spread`."""
    return spread(values, source, [target], packed=packed)[target]


def spread(
    values: Sequence[tf.Tensor], source: str, targets: Iterable[str], *, packed: bool
) -> dict[str, list[tf.Tensor]]:
    """Returns the values by target device, bit for bit; without `packed`, TensorFlow sends each.

    Only tensors of fixed shapes are packed; IndexedSlices and None may be among the values.
    """
    arrived = {target: list(values) for target in targets}
    others = [target for target in arrived if target != source]
    # On its own device a tensor needs no packing, and one tensor alone gains nothing.
    for chosen, shapes in packages(values) if packed and others else ():
        # Each target unpacks for itself, so that one vector crosses each link.
        if len(chosen) > 1:
            with tf.device(source):
                vector = pack([values[i] for i in chosen])
            for target in others:
                with tf.device(target):
                    for i, part in zip(chosen, unpack(vector, shapes), strict=True):
                        arrived[target][i] = part
    return arrived


def packages(values: Sequence[tf.Tensor]) -> list[tuple[list[int], list[tf.TensorShape]]]:
    """Returns (indices, shapes) of the tensors, or specs, that travel together as one package.

    Values of open shape or without elements are in no package. Values of at least `LARGE` bytes get
    a package each; smaller ones share one for each dtype.
    """
    found: dict[tuple[tf.DType, int | None], list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, tf.Tensor | tf.TensorSpec) and value.shape.num_elements():
            is_large = value.shape.num_elements() * value.dtype.size >= LARGE
            found.setdefault((value.dtype, i if is_large else None), []).append(i)
    return [(chosen, [values[i].shape for i in chosen]) for chosen in found.values()]


def pack(values: Sequence[tf.Tensor], multiple: int = 1) -> tf.Tensor:
    """Joins all values to one vector, padded with zeros to a size that `multiple` divides."""
    flat = [tf.reshape(value, [-1]) for value in values]
    missing = -sum(value.shape[0] for value in flat) % multiple
    return tf.concat([*flat, tf.zeros([missing], flat[0].dtype)] if missing else flat, axis=0)


def unpack(vector: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Splits a vector that `pack` made into values of these shapes."""
    sizes = [shape.num_elements() for shape in shapes]
    missing = vector.shape[0] - sum(sizes)
    parts = tf.split(vector, [*sizes, missing] if missing else sizes)
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=False)]
