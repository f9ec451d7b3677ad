"""Divides the pixels of uint8 images in x by 255; all other numbers stay.

    uint8 [N, height, width, ...]  ->  float32 in [0, 1]         rank 3 or more, N included
    uint8 [N], [N, features]       ->  0 ... 255 as they are     labels, bytes, counts

The rule holds for arrays, archives, tf.data, random-access sources and records. A model that begins
with a layer such as `Rescaling(1 / 255)` gets 0 ... 255, because it divides the pixels itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from towers.machine.keras_internals import all_layers, calls_in_order
from towers.resume.epoch import as_written
from towers.step.structures import BatchTensor, Structure

_Structure = TypeVar("_Structure")  # a result has the structure of the argument

_RANK = 3  # [N, height, width]
_DIVIDED = "uint8 images, divided by 255"
_LARGEST_SCALE = 1 / 64  # bytes are scaled by 1/255 or 1/127.5; a scale of 2 suits pixels in [0, 1]
_FOR_BYTES: dict[str, Callable[[float], bool]] = {  # whether `x / constant` etc. expects 0 ... 255
    "TrueDivide": lambda constant: constant >= 1 / _LARGEST_SCALE,
    "Divide": lambda constant: constant >= 1 / _LARGEST_SCALE,
    "Multiply": lambda constant: constant <= _LARGEST_SCALE,
    "Subtract": lambda constant: constant > 2,
    "Add": lambda constant: constant > 2,
}


def divided_parts(x: Structure) -> list[bool]:
    """Returns whether each part of x, the specs of one example, holds images to divide."""
    return list(map(_are_pixels, tf.nest.flatten(x)))


def divided(x: _Structure, parts: Sequence[bool]) -> _Structure:
    """Divides by 255 the marked parts of x, an example or a batch of arrays or tensors."""

    def change(part: BatchTensor) -> BatchTensor:
        if isinstance(part, np.ndarray):
            return np.divide(part, np.float32(255), dtype=np.float32)
        return tf.cast(part, tf.float32) / 255

    return _with_parts(x, parts, change)


def with_bytes(parts: Sequence[bool]) -> Callable[..., tuple[Structure, ...]]:
    """Returns a function for tf.data that multiplies these parts of x by 255, which is exact."""
    return as_written(lambda x, *others: (_with_parts(x, parts, lambda part: part * 255), *others))


def _with_parts(
    x: _Structure, parts: Sequence[bool], change: Callable[[BatchTensor], BatchTensor]
) -> _Structure:
    values = tf.nest.flatten(x)
    for index, is_changed in enumerate(parts):
        if is_changed:
            values[index] = change(values[index])
    return tf.nest.pack_sequence_as(x, values)


def scale_for_model(dataset: Any, model: keras.Model) -> Any:
    """Returns a Dataset that suits a model: pixels are 0 ... 255 if the model scales them."""
    if not any(dataset.divided):
        return dataset
    scales = scaling_layer(model, dataset.divided)
    if scales is None:
        return dataset
    kept = [note for note in dataset.notes if _DIVIDED not in note]
    note = f"images: 0 to 255 as they are, for {scales!r} of the model scales them"
    return replace(dataset, notes=[*kept, note], restored=dataset.divided)


def scaling_layer(model: keras.Model, parts: Sequence[bool]) -> str | None:
    """Returns the name of the layer or operation that scales pixels of 0 ... 255, or None.

    A `Rescaling` by at most 1/64 does, and a `Normalization` with a mean or a variance that pixels
    in [0, 1] cannot have. So does an operation such as `x / 255.0` before all layers with weights.
    """
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.Rescaling) and _largest(layer.scale) <= _LARGEST_SCALE:
            return str(layer.name)
        if isinstance(layer, keras.layers.Normalization) and not layer.invert:
            found = (getattr(layer, name, None) for name in ("mean", "variance"))
            values = [np.asarray(v) for v in found if v is not None]
            if any((v.ndim >= _RANK or len(parts) == 1) and _largest(v) > 1 for v in values):
                return str(layer.name)
    return _scaling_operation(model)


def _scaling_operation(model: keras.Model) -> str | None:
    """Returns the name of an operation that scales pixels of 0 ... 255, or None."""
    pixels = set[int]()  # tensors that hold pixels, by their ids
    for inner in all_layers(model):
        pixels.update(map(id, tf.nest.flatten(getattr(inner, "inputs", None) or [])))
    for operation, outputs, arguments in calls_in_order(model) or ():
        taken = map(id, keras.tree.flatten(arguments))
        if getattr(operation, "weights", None) or pixels.isdisjoint(taken):
            continue
        pixels.update(map(id, outputs))
        is_for_bytes = _FOR_BYTES.get(type(operation).__name__)
        constants = [v for v in arguments if not keras.utils.is_keras_tensor(v)]
        if is_for_bytes and constants and is_for_bytes(_largest(constants[0])):
            return str(operation.name)
    return None


def _largest(values: object) -> float:
    return float(np.max(np.abs(np.asarray(values))))


def notes(train: Structure, test: Structure = None) -> list[str]:
    """Returns lines that tell the user which uint8 parts of x are divided, and how to avoid it.

    train, test: the specs of one x of each split; test may be None.
    """
    parts = _pixel_paths(train)
    test_parts = parts if test is None else _pixel_paths(test)
    for path in {*parts} ^ {*test_parts}:
        only = "train" if path in parts else "test"
        raise ValueError(
            f"{path}: uint8 images in {only} alone would be divided by 255. Give one dtype in both "
            "train and test."
        )
    return [f"{path}: {_DIVIDED}; give floats to have them as they are" for path in parts]


def _pixel_paths(x: Structure) -> list[str]:
    """Returns the paths of the images in x, such as "x" or "x['image']"."""
    return [name for name, spec in named_parts("x", x) if _are_pixels(spec)]


def named_parts(name: str, structure: Structure) -> list[tuple[str, BatchTensor]]:
    """Returns the parts of a structure with their names, such as "x['image']" for name "x"."""
    return [
        (name + "".join(f"[{key!r}]" for key in path), part)
        for path, part in keras.tree.flatten_with_path(structure)
    ]


def _are_pixels(spec: tf.TensorSpec) -> bool:
    if tf.as_dtype(spec.dtype) != tf.uint8:
        return False
    rank = tf.TensorShape(spec.shape).rank
    if rank is None:
        raise ValueError(
            "x: uint8 of an unknown rank may be images or not; give it a shape by tf.ensure_shape."
        )
    return rank + 1 >= _RANK
