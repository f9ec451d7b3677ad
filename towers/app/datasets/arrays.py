"""Checks and converts arrays in memory. A classifier gets float32 examples and int32 labels.

x                  one array, or a dict, tuple or list of arrays [N, ...]
(x, y)             y: integer labels or targets, in the forms that x may have
(x, y, weights)    weights: the sample weight of each example
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.app.datasets.dataset import Found, check_arrays, check_finite
from towers.app.datasets.pixels import divided, divided_parts, named_parts
from towers.app.reading.examples import real_array
from towers.step.structures import Structure, as_tensor, is_scipy


def split_of(given: Any, where: str, num_classes: int | None, custom_loss: bool) -> Found:
    """Makes a split of (x, y) of arrays; with custom_loss also of x or (x, y, sample_weight).

    For a classifier, x becomes float32, and y, integers [N] or [N, 1] as in Keras' CIFAR-10, int32.
    For a custom loss, floats become Keras' floatx, other dtypes stay, and parts may be ragged or
    sparse. In both cases uint8 images in x are divided by 255 (see `pixels`).
    """
    if not custom_loss:
        x, y = real_array(given[0], f"{where}: x"), real_array(given[1], f"{where}: y")
        if y.shape[1:] == (1,):
            y = y[:, 0]
        spec = _specs(x)
        with np.errstate(over="ignore"):  # the infinity is found by check_arrays
            x = divided(x, divided_parts(spec)).astype(np.float32, copy=False)
        check_arrays(x, y, num_classes, where)
        specs = spec, tf.TensorSpec((), tf.int32)
        return (x, y.astype(np.int32)), specs, num_classes or int(y.max()) + 1
    parts = keras.utils.unpack_x_y_sample_weight(_tuple_of(given))
    if parts[1] is None and parts[2] is not None:
        raise ValueError(f"{where}: sample weights need y: give (x, y, sample_weight).")
    arrays: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for what, part in zip(("x", "y", "sample_weight"), parts, strict=True):
        if part is not None:
            arrays[what] = _arrays(part, what, where)
            lengths |= {name: int(a.shape[0]) for name, a in named_parts(what, arrays[what])}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{what} {length:,}" for what, length in lengths.items())
        raise ValueError(f"{where}: its parts differ in length: {listed} examples.")
    if not any(lengths.values()):
        raise ValueError(f"{where}: no examples; give at least one.")
    x, *others = arrays.values()
    specs = _specs(x), _specs(arrays.get("y"))
    return (divided(x, divided_parts(specs[0])), *others), specs, 1


def _specs(x: Structure) -> Structure:
    """Returns the specs of one example, from a structure of arrays [N, ...]."""
    return keras.tree.map_structure(
        lambda part: None if part is None else tf.TensorSpec(part.shape[1:], part.dtype), x
    )


def _tuple_of(values: Structure) -> Structure:
    """Turns a list of arrays into a tuple, as `fit` does: tf.data converts a list to one array."""
    if isinstance(values, list) and any(
        isinstance(v, dict | tuple) or getattr(v, "ndim", 0) > 0 for v in values
    ):
        return tuple(values)
    return values


def _arrays(values: Structure, what: str, where: str) -> Structure:
    """Returns a structure as checked arrays, `what`, such as "x", begins the name of each."""
    values = _tuple_of(values)
    if isinstance(values, dict):
        return {k: _arrays(v, f"{what}[{k!r}]", where) for k, v in values.items()}
    if isinstance(values, tuple):
        return tuple(_arrays(v, f"{what}[{i}]", where) for i, v in enumerate(values))
    if isinstance(values, tf.RaggedTensor):
        flat = _arrays(values.flat_values, what, where)
        return values.with_flat_values(tf.convert_to_tensor(flat))
    if isinstance(values, tf.SparseTensor) or is_scipy(values):
        sparse = tf.sparse.reorder(as_tensor(values))
        return sparse.with_values(tf.convert_to_tensor(_arrays(sparse.values, what, where)))
    array = real_array(values, f"{where}: {what}")
    if array.ndim == 0:
        raise ValueError(f"{where}: {what} is one number, but must be [N, ...]: N examples.")
    if array.dtype.kind == "f":
        array = array.astype(keras.config.floatx(), copy=False)
    check_finite(array, where, what)
    return array
