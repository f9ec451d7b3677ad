"""Defines `Dataset`, and checks arrays of examples and labels.

Data may take a quarter of the usable memory.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from towers.machine.words import counted
from towers.app.datasets.source import DataSource
from towers.step.structures import Structure

_MOST_CLASSES = 2**31 - 1  # labels are int32
MEMORY_SHARE = 0.25  # data that take more are read while training runs
GROUPS = Path("/proc/self/cgroup")  # the control groups of this process
MOUNTED = Path("/sys/fs/cgroup")


def usable_memory() -> int:
    """Returns the bytes of memory of the machine, or a lower limit of the container."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError):  # only Linux has cgroups(7)
        for line in GROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            folder = MOUNTED / controllers / path.lstrip("/")
            for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and version 1
                with suppress(OSError, ValueError):  # there is no such file, or it holds "max"
                    limits.append(int((folder / name).read_text(encoding="ascii")))
    return min(limits)


def fits(num_bytes: int) -> bool:
    """Returns whether data of this size may stay in memory."""
    return num_bytes <= MEMORY_SHARE * usable_memory()


Arrays: TypeAlias = tuple[np.ndarray, np.ndarray]  # x [N, ...], y [N]
# Arrays, structures of arrays, an unbatched tf.data.Dataset, or a source read while training runs.
Split: TypeAlias = "Arrays | tuple[Structure, ...] | tf.data.Dataset | DataSource"
# A split, the specs of one x and one y as they were given, and the number of classes in it.
Found: TypeAlias = tuple[Split, tuple[Structure, Structure], int]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Holds the examples to train and to test on.

    name: a built-in name, "package.module:function", or any name for given data.
    train, test: (x, y), x float32 (or int32, for tokens) [N, *input_shape] and y int32 [N] in
        0 ... num_classes - 1; or an unbatched tf.data.Dataset of such (x, y), without the N; or a
        source of examples that are read while training runs.
    num_classes: the number of labels. None for a custom loss: x and y may then have any structure,
        `train` may also be x or (x, y, sample_weight), and `test` may be None.
    input_shape: the shape of one x; if x is a structure, a structure of shapes.
    notes, warnings: lines for the user on how the examples were read.
    class_names, test_names: the name of each label and test example (its file); () if unknown.
    divided: for each part of x, flattened, whether its pixels are divided by 255; () for none.
    restored: for each part of x, whether it is multiplied by 255 again for the model.
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
        """Returns for each part of x whether the model gets pixels divided by 255; [] if none."""
        if any(self.restored):
            return []
        return list(self.divided)


def check_arrays(x: np.ndarray, y: np.ndarray, num_classes: int | None, where: str) -> None:
    """Raises ValueError unless x [N, ...] is finite, and y [N] integers in 0 ... num_classes - 1.

    num_classes: None if the labels will tell it; they may then be any int32 from 0 on.
    where: the file or function that they come from, shown in errors.
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
    wrong = (y < 0) | (y >= (num_classes or _MOST_CLASSES))
    if wrong.any():
        index = int(wrong.argmax())
        wanted = "number the classes 0, 1, 2 and so on, and leave out examples without a class"
        if num_classes is not None:
            wanted = f"labels must lie in 0 to {num_classes - 1}"
        raise ValueError(f"{where}: label {y[index]} of example {index} is out of range; {wanted}.")
    check_finite(x, where)


def check_finite(x: np.ndarray, where: str, what: str = "x") -> None:
    """Raises ValueError if x, an array [N, ...] of any dtype, holds NaN or infinity."""
    # min and max take no extra memory, and are NaN if any value is.
    if x.dtype.kind == "f" and x.size and not np.isfinite([x.min(), x.max()]).all():
        index = tuple(map(int, np.unravel_index(np.isfinite(x).argmin(), x.shape)))
        raise ValueError(
            f"{where}: example {index[0]} holds {x[index]} (at {what}{list(index)}); remove or "
            "replace NaN and infinite values."
        )


def other_length(where: str, num_now: int, num_examples: int) -> ValueError:
    """Returns the error for a split whose number of examples has changed since the run began."""
    return ValueError(
        f"{where}: {counted(num_now, 'example')} now, {num_examples:,} at the start. A run needs "
        "the same ones throughout: restore them, or start a new run."
    )


def is_pair(value: object) -> bool:
    """Returns whether a value is a tuple or list of two, such as (x, y) or (train, test)."""
    return isinstance(value, tuple | list) and len(value) == 2


def describe(value: object) -> str:
    """Describes the type of a value, for an error."""
    if isinstance(value, tuple | list):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"
