"""Examples of any structure, for a model that brings its own loss: what they are is its matter.

    x                  one array, or a dict, tuple or list of arrays [N, ...]
    (x, y)             likewise y: labels of any kind, or targets
    (x, y, weights)    and what each example counts
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from towers.datasets import pixels
from towers.datasets.dataset import Dataset, Split, check_count, check_finite
from towers.datasets.random_access import RandomAccess, from_source, is_random_access
from towers.named import one_line

Structure: TypeAlias = Any  # dicts and tuples, nested, of arrays or of what stands for one

_HOW_TO_PAD = "pad its rows to one length, or give a tf.RaggedTensor"
_HOW_TO_TOKENIZE = "turn text into numbers first, such as with keras.layers.TextVectorization"


def from_splits(name: str, train: Any, test: Any) -> Dataset:
    """A data set of any structure; floats become Keras' floatx, as in `fit`.

    uint8 images of x are divided by 255, see `pixels`; all else stays.

    Args:
        name: of the data set.
        train: x, (x, y) or (x, y, sample_weight), structures of what `np.asarray` takes; or an
            unbatched tf.data.Dataset of such elements, whose values are not checked; or a
            random-access source of (x, y), whose 64-bit numbers become 32-bit.
        test: the same; None for no validation.

    Raises:
        ValueError: a part is no array of numbers, holds NaN or infinity, or differs in length; or
            train and test differ in shape.
    """
    given = {"train": train} if test is None else {"train": train, "test": test}
    found = {which: _split(split, f"{name} ({which})") for which, split in given.items()}
    splits, specs = ({which: pair[i] for which, pair in found.items()} for i in (0, 1))
    notes = pixels.notes(**specs)
    shapes = {which: _shapes(split) for which, split in splits.items()}
    for which, (x, y) in shapes.items():
        if (x, y) != shapes["train"]:
            raise ValueError(
                f"{name} ({which}): examples of {_shown(x, y)}, but those of train are of "
                f"{_shown(*shapes['train'])}."
            )
    return Dataset(
        name, splits["train"], splits.get("test"), None, shapes["train"][0], notes
    )


def _split(split: Any, where: str) -> tuple[Split, Structure]:
    """The split, and the specs of one x as it was given."""
    if isinstance(split, tf.data.Dataset):
        _check_elements(split, where)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(split.element_spec)
        return split, x
    if is_random_access(split):
        source = from_source(split, where, None, own_task=True)
        return source, source.structure[0]
    parts = keras.utils.unpack_x_y_sample_weight(_tuples(split))
    if parts[1] is None and parts[2] is not None:
        raise ValueError(f"{where}: sample weights need y: give (x, y, sample_weight).")
    given = dict(zip(("x", "y", "sample_weight"), parts, strict=True))
    arrays = {what: _arrays(v, what, where) for what, v in given.items() if v is not None}
    _check_lengths(arrays, where)
    given = pixels.specs_of(arrays["x"])
    return (pixels.divided(arrays.pop("x")), *arrays.values()), given


def _tuples(value: Any) -> Any:
    """Lists of arrays as tuples, as in `fit`: tf.data takes a list for an array."""
    if isinstance(value, dict):
        return {key: _tuples(part) for key, part in value.items()}
    if isinstance(value, tuple) or isinstance(value, list) and _holds_arrays(value):
        return tuple(_tuples(part) for part in value)
    return value


def _holds_arrays(values: list) -> bool:
    return any(isinstance(v, dict | tuple) or getattr(v, "ndim", 0) > 0 for v in values)


def _arrays(values: Structure, what: str, where: str) -> Structure:
    if isinstance(values, dict):
        return {k: _arrays(v, f"{what}[{k!r}]", where) for k, v in values.items()}
    if isinstance(values, tuple):
        return tuple(_arrays(v, f"{what}[{i}]", where) for i, v in enumerate(values))
    if isinstance(values, tf.RaggedTensor):
        flat = _arrays(values.flat_values, what, where)
        return values.with_flat_values(tf.convert_to_tensor(flat))
    try:
        array = np.asarray(values)
    except Exception as error:  # rows of different lengths; whatever a library's own type raises
        raise ValueError(
            f"{where}: {what} ({type(values).__name__}) is no array ({one_line(error)}): "
            f"{_HOW_TO_PAD}."
        ) from None
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{where}: {what} has dtype {array.dtype}, but must hold real numbers; "
            f"{_HOW_TO_TOKENIZE if array.dtype.kind in 'SU' else _HOW_TO_PAD}."
        )
    if array.ndim == 0:
        raise ValueError(f"{where}: {what} is one number, but must be [N, ...]: N examples.")
    if array.dtype.kind == "f":
        array = array.astype(keras.config.floatx(), copy=False)
    check_finite(array, where, what)
    return array


def _check_lengths(arrays: dict[str, Structure], where: str) -> None:
    lengths = {
        "".join([what, *(f"[{key!r}]" for key in path)]): int(array.shape[0])
        for what, part in arrays.items()
        for path, array in keras.tree.flatten_with_path(part)
    }
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{what} {length:,}" for what, length in lengths.items())
        raise ValueError(f"{where}: its parts differ in length: {listed} examples.")
    if not any(lengths.values()):
        raise ValueError(f"{where}: no examples; give at least one.")


def _check_elements(split: tf.data.Dataset, where: str) -> None:
    for spec in tf.nest.flatten(split.element_spec):
        is_tensor = isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec)
        if not is_tensor or not (spec.dtype.is_numeric or spec.dtype.is_bool):
            raise ValueError(
                f"{where}: its elements hold {spec}, but must hold numbers, dense or ragged."
            )
    check_count(split, where)


def _shapes(split: Split) -> tuple[Structure, Structure]:
    """The shapes of one x and of one y, with their structure; None for a size that varies."""
    if isinstance(split, tf.data.Dataset):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(split.element_spec)
        return tuple(_map(lambda spec: tuple(spec.shape), part) for part in (x, y))
    if isinstance(split, RandomAccess):
        return tuple(_map(lambda spec: tuple(spec.shape), part) for part in split.structure)
    x, y, _ = keras.utils.unpack_x_y_sample_weight(split)
    return tuple(_map(lambda array: tuple(array.shape[1:]), part) for part in (x, y))


def _map(function: Callable[[Any], Any], structure: Structure) -> Structure:
    return None if structure is None else tf.nest.map_structure(function, structure)


def _shown(x: Structure, y: Structure) -> str:
    return f"shape {x}" if y is None else f"shapes {x} and {y}"
