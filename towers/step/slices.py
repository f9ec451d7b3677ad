"""Cuts values into slices of their rows, one for each device, and keeps a slot in such slices.

    kernel [3, 3, 5, 64] on 2 devices:  rows [45, 64] -->  [23, 64], [22 + 1 of zeros, 64]

A row has the elements of the last axis. All slices have one shape, for one program.
"""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.machine.devices import HOST
from towers.machine.keras_internals import store_in

_KINDS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Lion")
_WIDTH = 64  # XLA compiles shorter rows to other instructions, some of which round differently


def check_elementwise(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError unless an optimizer updates each element of a parameter separately."""
    kind = type(optimizer)
    if all(kind is not getattr(keras.optimizers, name) for name in _KINDS):
        raise ValueError(
            f"strategy=sharded: {kind.__name__} may need whole parameters, and each device updates "
            f"a slice. Use strategy=mirrored, or one of Keras' own {', '.join(_KINDS)}."
        )
    for name in ("clipnorm", "global_clipnorm"):
        if getattr(optimizer, name) is not None:
            raise ValueError(
                f"strategy=sharded: {name} ({getattr(optimizer, name)}) needs the norm of whole "
                "gradients, and each device has a slice. Use strategy=mirrored, or clipvalue."
            )


def cut_shapes(parameters: Sequence[keras.Variable], count: int) -> set[tuple[int, ...]]:
    """Returns the shapes of parameters that `count` devices cut; the others stay whole.

    A constraint may compute norms, so it needs whole parameters.
    """
    shapes = {tuple(v.shape) for v in parameters}
    whole = {tuple(v.shape) for v in parameters if v.constraint is not None}
    return {
        shape for shape in shapes - whole
        if len(shape) > 1 and shape[-1] >= _WIDTH and math.prod(shape[:-1]) >= count
    }


def slice_of(value: Any, shape: Sequence[int], index: int, count: int) -> Any:
    """Returns slice `index` of a value of this shape.

    value: a tensor, a variable, IndexedSlices or None. None and tensors that are slices stay.
    """
    num_rows, width = -(-math.prod(shape[:-1]) // count), shape[-1]
    begin = index * num_rows
    if isinstance(value, tf.IndexedSlices):
        own = (value.indices >= begin) & (value.indices < begin + num_rows)
        indices = tf.boolean_mask(value.indices, own) - begin
        dense_shape = tf.constant([num_rows, width], tf.int64)
        return tf.IndexedSlices(tf.boolean_mask(value.values, own), indices, dense_shape)
    if value is None or value.shape == (num_rows, width):
        return value
    rows = tf.reshape(value, [-1, width])[begin:begin + num_rows]
    return tf.pad(rows, [[0, num_rows - rows.shape[0]], [0, 0]])


def join_slices(slices: Sequence[Any], shape: Sequence[int]) -> tf.Tensor:
    """Returns the value of this shape from all its slices."""
    return tf.reshape(tf.concat(slices, axis=0)[:math.prod(shape[:-1])], shape)


class SlicedVariable:
    """Replaces the tf.Variable behind a Keras variable by slices on several devices.

    Reading joins them, and assigning cuts the new value, as files, callbacks and Keras do it.
    """

    def __init__(self, variable: tf.Variable, devices: Sequence[str]) -> None:
        self.shape, self.dtype, self.device = variable.shape, variable.dtype, variable.device
        self.devices, self.slices = list(devices), []
        for i, device in enumerate(devices):
            with tf.device(device):
                value = slice_of(variable, self.shape, i, len(devices))
                name = variable.name.split(":")[0]  # which a weight decay may exclude
                self.slices.append(tf.Variable(value, trainable=False, name=name))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(join_slices(self.slices, self.shape), dtype, name=name)

    def numpy(self) -> np.ndarray:
        """Returns the value as an array."""
        with tf.device(HOST):
            return np.array(tf.convert_to_tensor(self))

    def assign(self, value: Any) -> None:
        """Assigns a value of the whole shape."""
        whole, count = tf.convert_to_tensor(value, self.dtype), len(self.devices)
        for i, (device, part) in enumerate(zip(self.devices, self.slices, strict=True)):
            with tf.device(device):
                part.assign(slice_of(whole, self.shape, i, count))


def put_in_slices(variable: keras.Variable, devices: Sequence[str]) -> SlicedVariable:
    """Makes a Keras variable keep its value in slices on these devices; returns the slices."""
    whole = variable.value
    if isinstance(whole, SlicedVariable):
        return whole
    sliced = SlicedVariable(whole, devices)
    store_in(variable, sliced)
    # Frees the memory. Graphs that were traced before this would update it; the shape stops them.
    tf.raw_ops.AssignVariableOp(resource=whole.handle, value=tf.zeros([0], whole.dtype))
    return sliced


def check_slots(optimizer: keras.optimizers.Optimizer, devices: Sequence[str]) -> None:
    """Raises ValueError if the optimizer's slots are in slices, but not on these devices."""
    for variable in optimizer.variables:
        value = variable.value
        if isinstance(value, SlicedVariable) and value.devices != devices:
            raise ValueError(
                f"the optimizer's slots are in slices on {', '.join(value.devices)}, by an earlier "
                "strategy=sharded. Use strategy=sharded on these devices, or save the model and "
                "load it again."
            )
