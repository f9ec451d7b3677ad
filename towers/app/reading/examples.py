"""Reads examples of a source as arrays in a fixed order; all must be like the first example.

(x, {"b": y, "a": z})   ->   x, y['a'], y['b']
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from towers.app import named

MEND = "Fix it, then continue with `resume`."


class Leaf(NamedTuple):
    """Describes one array of every example; its path is, for instance, "x" or "y['a']"."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.path} of {self.dtype.name} and shape {self.shape}"


@dataclass(frozen=True, eq=False)
class Source:
    """Holds examples, an object with `__len__` and `__getitem__(index) -> (x, y)`.

    All have these leaves. num_classes: None if y is not a label. Errors begin with `where`.
    """

    examples: Any
    where: str
    leaves: tuple[Leaf, ...]
    num_classes: int | None

    def read(
        self, indices: Iterable[int], begin: Callable[[int], None] = lambda index: None
    ) -> list[np.ndarray]:
        """Reads N examples into one array [N, ...] a leaf; calls `begin(index)` before each one."""
        places = list(map(int, indices))
        stacked = [np.empty((len(places), *leaf.shape), leaf.dtype) for leaf in self.leaves]
        for row, index in enumerate(places):
            begin(index)
            _, arrays = read_example(self.examples, index, self.where)
            for found, first in zip_longest(arrays, self.leaves):
                if found != first:
                    raise ValueError(
                        f"{self.where}: example {index} holds {found or 'less'}, but example 0 "
                        f"held {first or 'less'}; all must be alike. {MEND}"
                    )
            for array, values in zip(stacked, arrays.values(), strict=True):
                array[row] = values
            if self.num_classes is not None and not 0 <= values < self.num_classes:
                raise ValueError(
                    f"{self.where}: example {index}: label {values} is out of range; labels must "
                    f"lie in 0 to {self.num_classes - 1}."
                )
        return stacked


def real_array(value: object, name: str) -> np.ndarray:
    """Returns the array of a value. Raises ValueError, which begins with `name`, if it has none."""
    try:
        array = np.asarray(value)
    except Exception as error:  # rows differ in length, or a library's type raises any error
        raise ValueError(
            f"{name} ({type(value).__name__}) is no array ({named.one_line(error)}): pad its rows to one "
            "length; data in memory may be a tf.RaggedTensor."
        ) from None
    if array.dtype.kind == "c":
        raise ValueError(
            f"{name} has dtype {array.dtype}, but must hold real numbers: give both parts, such as "
            "np.stack([x.real, x.imag], axis=-1), or np.abs(x)."
        )
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{name} has dtype {array.dtype}, but must hold real numbers; use .astype('float32'), "
            "or turn text into numbers, such as with keras.layers.TextVectorization."
        )
    return array


def read_example(examples: Any, index: int, where: str) -> tuple[object, dict[Leaf, np.ndarray]]:
    """Reads an example. Returns (x, y) with an array for each value, and its arrays by `Leaf`."""
    arrays = {}

    def as_array(value: object, path: str) -> object:
        # As in tf.data: dicts and tuples are structures, a list is an array.
        if isinstance(value, dict):
            parts = {key: as_array(value[key], f"{path}[{key!r}]") for key in sorted(value)}
            return {key: parts[key] for key in value}
        if isinstance(value, tuple):
            return tuple(as_array(part, f"{path}[{n}]") for n, part in enumerate(value))
        array = real_array(value, f"{where}: example {index}: {path}")
        arrays[Leaf(path, array.shape, array.dtype)] = array
        return array

    try:
        example = examples[index]
    except (Exception, SystemExit) as error:  # the source may raise anything
        raise ValueError(
            f"{where}: example {index} cannot be read: {named.one_line(error)}. {MEND}"
        ) from error
    if not isinstance(example, tuple | list) or len(example) != 2:
        what = type(example).__name__
        raise ValueError(f"{where}: example {index} is a {what}, but an example must be (x, y).")
    return (as_array(example[0], "x"), as_array(example[1], "y")), arrays
