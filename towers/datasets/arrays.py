"""Arrays as people have them -> a checked Dataset of float32 examples and int32 labels."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from towers.datasets.dataset import Dataset, check_arrays
from towers.datasets.pixels import divided


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
