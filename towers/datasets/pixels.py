"""Pixels: uint8 images of x, divided by 255 whatever they come in; all other numbers stay.

    uint8 [N, height, width, ...]  ->  float32 in [0, 1]         rank 3 or more, N included
    uint8 [N], [N, features]       ->  0 ... 255 as they are     labels, bytes, counts

Arrays, archives, tf.data, random-access sources and records: one rule, for any model.
"""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_RANK = 3  # [N, height, width]


def are_pixels(part: Any, *, is_batch: bool) -> bool:
    """Whether an array, a tensor or its spec is of uint8 images; `is_batch`: [N, ...], not one."""
    if not _is_uint8(part):
        return False
    rank = tf.TensorShape(part.shape).rank
    if rank is None:
        raise ValueError(
            "x: uint8 of an unknown rank may be images or not; give it a shape by tf.ensure_shape."
        )
    return rank + (not is_batch) >= _RANK


def divided(x: Any, *, is_batch: bool = True) -> Any:
    """A structure of arrays or tensors, the pixels among them in [0, 1]."""

    def change(part: Any) -> Any:
        if not are_pixels(part, is_batch=is_batch):
            return part
        if isinstance(part, np.ndarray):
            return np.divide(part, np.float32(255), dtype=np.float32)
        return tf.cast(part, tf.float32) / 255

    return tf.nest.map_structure(change, x)


def has_pixels(example: Any) -> bool:
    """Whether the x of one example, or of its spec, holds pixels; it is x, (x, y) or (x, y, w)."""
    x = example[0] if isinstance(example, tuple) else example
    return any(are_pixels(part, is_batch=False) for part in tf.nest.flatten(x))


def with_divided_x(example: Any) -> Any:
    """One example, x, (x, y) or (x, y, w), with the pixels of its x in [0, 1]."""
    if isinstance(example, tuple):
        return (divided(example[0], is_batch=False), *example[1:])
    return divided(example, is_batch=False)


def specs_of(x: Any) -> Any:
    """The specs of one example of a structure of arrays [N, ...]."""
    return keras.tree.map_structure(lambda part: tf.TensorSpec(part.shape[1:], part.dtype), x)


def notes(train: Any, test: Any = None) -> list[str]:
    """Lines for the user on what becomes of uint8 in x, and what to do about it.

    Args:
        train, test: specs of one x of each split, as the user gives them; None: no such split.
    """
    splits = {"train": train, "test": train if test is None else test}
    found = {which: list(_uint8_leaves(x)) for which, x in splits.items()}
    if found["train"] == found["test"]:
        found = {"": found["train"]}
    lines = []
    for which, leaves in found.items():
        for path, is_image in leaves:
            what = f"{path} ({which})" if which else path
            lines.append(
                f"{what}: uint8 images, divided by 255; give floats to have them as they are"
                if is_image else
                f"{what}: uint8 of less than {_RANK} dimensions, so no images: 0 to 255 as it is"
            )
    return lines


def _uint8_leaves(x: Any) -> Iterable[tuple[str, bool]]:
    """Each part of uint8: its path, such as x['image'], and whether it is of images."""
    for path, spec in keras.tree.flatten_with_path(x):
        if _is_uint8(spec):
            keys = "".join(f"[{key!r}]" for key in path)
            yield f"x{keys}", are_pixels(spec, is_batch=False)


def _is_uint8(part: Any) -> bool:
    return tf.as_dtype(part.dtype) == tf.uint8
