"""Arrays as people have them, in memory: for classes float32 examples and int32 labels.

    x                  one array, or a dict, tuple or list of arrays [N, ...]
    (x, y)             likewise y: labels of any kind, or targets
    (x, y, weights)    and what each example counts
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from towers.app.datasets.dataset import Dataset, check_arrays, check_finite
from towers.app.datasets.pixels import are_pixels, divided, notes, specs_of
from towers.app.named import one_line
from towers.step.tensor_rows import as_tensor, is_scipy

_HOW_TO_PAD = "pad its rows to one length, or give a tf.RaggedTensor"
_HOW_TO_TOKENIZE = "turn text into numbers first, such as with keras.layers.TextVectorization"


def of_classes(name: str, train: Any, test: Any, num_classes: int | None) -> Dataset:
    """A data set of `from_arrays` whose notes say what became of its pixels."""
    where = (f"{name} (x_train, y_train)", f"{name} (x_test, y_test)")
    dataset = from_arrays(name, tuple(train), tuple(test), where, num_classes)
    return replace(dataset, notes=notes(*(specs_of(np.asarray(x)) for x, _ in (train, test))))


def of_any(split: Any, where: str) -> tuple[Any, tuple[Any, Any]]:
    """A split of any structure, and the specs of one x and one y as they were given.

    Raises:
        ValueError: a part is no array of numbers, holds NaN or infinity, or differs in length.
    """
    parts = keras.utils.unpack_x_y_sample_weight(_tuples(split))
    if parts[1] is None and parts[2] is not None:
        raise ValueError(f"{where}: sample weights need y: give (x, y, sample_weight).")
    given = dict(zip(("x", "y", "sample_weight"), parts, strict=True))
    arrays = {what: _arrays(v, what, where) for what, v in given.items() if v is not None}
    _check_lengths(arrays, where)
    specs = specs_of(arrays["x"]), specs_of(arrays["y"]) if "y" in arrays else None
    return (divided(arrays.pop("x")), *arrays.values()), specs


def from_arrays(
    name: str,
    train: tuple[ArrayLike, ArrayLike],
    test: tuple[ArrayLike, ArrayLike],
    where: Sequence[str],
    num_classes: int | None = None,
) -> Dataset:
    """A data set from arrays of any numeric type.

    x: uint8 images are divided by 255 (see `pixels`); all other numbers keep their values.
        Everything becomes float32.
    y: integers [N], or [N, 1] as in Keras' CIFAR-10. They become int32.

    Args:
        name: of the data set.
        train: (x, y), what `np.asarray` takes.
        test: the same.
        where: the sources of train and of test, such as file names, for the errors.
        num_classes: None means 1 + the largest label of both splits.

    Raises:
        ValueError: see `check_arrays`; also when train and test differ in the shape of x.
    """
    splits = [
        (_examples(x, source), _labels(y, source))
        for (x, y), source in zip((train, test), where, strict=True)
    ]
    if num_classes is None:
        num_classes = max(_count_labels(y) for _, y in splits)
    for (x, y), source in zip(splits, where, strict=True):
        check_arrays(x, y, num_classes, source)
    (x_train, y_train), (x_test, y_test) = splits
    shape = x_train.shape[1:]
    if x_test.shape[1:] != shape:
        raise ValueError(
            f"{where[1]}: examples have shape {x_test.shape[1:]}, but those of {where[0]} have "
            f"{shape}; training and test examples must have one shape."
        )
    return Dataset(
        name,
        (x_train, y_train.astype(np.int32)),
        (x_test, y_test.astype(np.int32)),
        num_classes,
        tuple(shape),
        divided=[are_pixels(np.asarray(train[0]), is_batch=True)],
    )


def _examples(x: ArrayLike, where: str) -> np.ndarray:
    array = _as_array(x, "x", where)
    with np.errstate(over="ignore"):  # the infinity is found by check_arrays
        return divided(array).astype(np.float32, copy=False)


def _labels(y: ArrayLike, where: str) -> np.ndarray:
    array = _as_array(y, "y", where)
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _as_array(values: ArrayLike, what: str, where: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):  # such as a list of rows of different lengths
        raise ValueError(f"{where}: {what} ({type(values).__name__}) is no array.") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{where}: {what} has dtype {array.dtype}, but must hold real numbers; use "
            f"{what}.astype('float32')."
        )
    return array


def _count_labels(y: np.ndarray) -> int:
    # What check_arrays is about to refuse counts as 1 label here.
    if y.dtype.kind not in "iu" or y.size == 0:
        return 1
    return min(max(int(y.max()) + 1, 1), 2**31 - 1)


# Of any structure


def _tuples(value: Any) -> Any:
    """Lists of arrays as tuples, as in `fit`: tf.data takes a list for an array."""
    if isinstance(value, dict):
        return {key: _tuples(part) for key, part in value.items()}
    if isinstance(value, tuple) or isinstance(value, list) and _holds_arrays(value):
        return tuple(_tuples(part) for part in value)
    return value


def _holds_arrays(values: list) -> bool:
    return any(isinstance(v, dict | tuple) or getattr(v, "ndim", 0) > 0 for v in values)


def _arrays(values: Any, what: str, where: str) -> Any:
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


def _check_lengths(arrays: dict[str, Any], where: str) -> None:
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
