"""Tensors from one device to another as one transfer a dtype, instead of one a tensor.

    pack on the source: [a, b, c] -> one vector          unpack on the target: vector -> [a, b, c]

Each transfer has a cost of its own, which many small tensors pay many times; packing copies every
byte once more at both ends. Which is faster depends on the model and on the machine's bus.
"""

from typing import Any

import tensorflow as tf


def move(values: list[Any], source: str, target: str, *, packed: bool) -> list[Any]:
    """Sends values to the target, bit for bit; unpacked, TensorFlow does so one by one.

    Args:
        values: tensors of fixed shapes, on the source; what is none of these (IndexedSlices, None,
            tensors of unknown shape) is handed on as it is.
        source, target: device names.
        packed: whether they travel as one tensor a dtype.
    """
    if not packed or source == target:
        return values
    moved = list(values)
    packable = [
        i for i, value in enumerate(values)
        if isinstance(value, tf.Tensor) and value.shape.is_fully_defined()
    ]
    for dtype in dict.fromkeys(values[i].dtype for i in packable):
        same = [i for i in packable if values[i].dtype == dtype]
        with tf.device(source):
            packed = tf.concat([tf.reshape(values[i], [-1]) for i in same], axis=0)
        with tf.device(target):
            sizes = [values[i].shape.num_elements() for i in same]
            for i, part in zip(same, tf.split(packed, sizes), strict=True):
                moved[i] = tf.reshape(part, values[i].shape)
    return moved
