"""Dataset, and the checks that arrays of classes must pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from towers.machine.words import counted
from towers.resume.source import DataSource

Arrays: TypeAlias = tuple[np.ndarray, np.ndarray]  # x [N, ...], y [N]
# Arrays, or structures of them, or an unbatched tf.data.Dataset, or what is read in its turn.
Split: TypeAlias = "Arrays | tuple[Any, ...] | tf.data.Dataset | DataSource"
# A split, the specs of one x and one y as they were given, and the number of classes in it.
Found: TypeAlias = tuple[Any, tuple[Any, Any], int]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples to train and to test on.

    Attributes:
        name: a built-in name, or "package.module:function".
        train, test: (x, y), x float32 (or int32, for tokens) [N, *input_shape] and y int32 [N] in
            0 ... num_classes - 1; or an unbatched tf.data.Dataset of such (x, y), without the N; or
            a source of examples that are read while training runs.
        num_classes: the number of labels; None where the examples have any structure: then train
            and test are as `user.from_splits` says, and test may be None.
        input_shape: the shape of one x; of a structure, that of each part.
        notes, warnings: what to tell the user of how the examples were taken, in lines.
        class_names: by label; () where they have none.
        test_names: the names of the test examples, such as of their files; () where they have none.
        divided: for each part of x, flattened, whether its pixels were divided by 255; () where x
            holds no images.
        restored: for each part of x, whether it is multiplied by 255 again, see `pixels.suited`.
    """

    name: str
    train: Split
    test: "Split | None"
    num_classes: int | None
    input_shape: Any
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    class_names: Sequence[str] = ()
    test_names: Sequence[str] = ()
    divided: Sequence[bool] = ()
    restored: Sequence[bool] = ()

    @property
    def divided_for_model(self) -> list[bool]:
        """For each part of x, whether the model gets pixels divided by 255; [] without images."""
        return [] if any(self.restored) else list(self.divided)


def check_arrays(x: np.ndarray, y: np.ndarray, num_classes: int, where: str) -> None:
    """Checks the examples and the labels of one split.

    Args:
        x: [N, ...], numbers.
        y: [N], integers in 0 ... num_classes - 1.
        num_classes: the number of labels.
        where: the file or function that they come from, for the error.

    Raises:
        ValueError: the shapes or counts do not fit, there are no examples, a label is no integer
            or out of range, or a value is NaN or infinite.
    """
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise ValueError(f"{where}: x has shape {x.shape}, but must be [N, ...]: N examples.")
    if y.ndim != 1:
        raise ValueError(
            f"{where}: labels have shape {y.shape}, but must be [N], one integer an example "
            "(for one-hot labels, use y.argmax(axis=1))."
        )
    if len(x) != len(y):
        raise ValueError(f"{where}: {len(x):,} examples, but {len(y):,} labels; give one each.")
    if len(x) == 0:
        raise ValueError(f"{where}: no examples; give at least one.")
    if y.dtype.kind not in "iu":
        raise ValueError(
            f"{where}: labels are {y.dtype}, but must be integers; use y.astype('int32')."
        )
    wrong = (y < 0) | (y >= num_classes)
    if wrong.any():
        index = int(wrong.argmax())
        raise ValueError(
            f"{where}: label {y[index]} of example {index} is out of range; labels must lie in "
            f"0 to {num_classes - 1}."
        )
    check_finite(x, where)


def check_finite(x: np.ndarray, where: str, what: str = "x") -> None:
    """Raises ValueError where one of N examples, [N, ...] of any type, holds NaN or infinity."""
    # A minimum takes no memory, and it is NaN where one value is.
    if x.dtype.kind == "f" and x.size and not np.isfinite([x.min(), x.max()]).all():
        index = tuple(map(int, np.unravel_index(np.isfinite(x).argmin(), x.shape)))
        raise ValueError(
            f"{where}: example {index[0]} holds {x[index]} (at {what}{list(index)}); remove or "
            "replace NaN and infinite values."
        )


def other_length(where: str, num_now: int, num_examples: int) -> ValueError:
    """The error for a split that has another number of examples than when the run began."""
    return ValueError(
        f"{where}: {counted(num_now, 'example')} now, {num_examples:,} at the start. A run needs "
        "the same ones throughout: restore them, or start a new run."
    )


def is_pair(value: object) -> bool:
    """Whether a value is (x, y), or (train, test)."""
    return isinstance(value, tuple | list) and len(value) == 2


def describe(value: object) -> str:
    """A value in the words of an error."""
    if isinstance(value, tuple | list):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"
