"""One example of a source -> its arrays, in one order; all examples look like the first one.

    (x, {"b": y, "a": z})   ->   x, y['a'], y['b']
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from towers.app.named import one_line

MEND = "Mend it; `resume` then goes on from there."


class Leaf(NamedTuple):
    """One array of every example; its path is such as "x" or "y['a']"."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.path} of {self.dtype.name} and shape {self.shape}"


@dataclass(frozen=True, eq=False)
class Source:
    """Examples that are read one by one.

    examples: has `__len__` and `__getitem__(index) -> (x, y)`.
    where: what they are, for the errors.
    leaves: of every example.
    num_classes: y is a label below it; None: y is anything else.
    """

    examples: Any
    where: str
    leaves: tuple[Leaf, ...]
    num_classes: int | None

    def read(
        self, indices: Iterable[int], begin: Callable[[int], None] = lambda index: None
    ) -> list[np.ndarray]:
        """Some of the examples, one array [N, ...] for each leaf.

        Args:
            indices: which, in this order.
            begin: is called with each index before it is read.

        Raises:
            ValueError: an example cannot be read, or is unlike the first one (naming its index).
        """
        places = list(map(int, indices))
        stacked = [np.empty((len(places), *leaf.shape), leaf.dtype) for leaf in self.leaves]
        for row, index in enumerate(places):
            begin(index)
            example = read_example(self.examples, index, self.where)
            arrays = arrays_of(example, index, self.where)
            self._check(index, arrays)
            for array, values in zip(stacked, arrays.values(), strict=True):
                array[row] = values
        return stacked

    def _check(self, index: int, arrays: dict[str, np.ndarray]) -> None:
        for found, first in zip_longest(leaves_of(arrays), self.leaves):
            if found != first:
                raise ValueError(
                    f"{self.where}: example {index} holds {found or 'less'}, but example 0 held "
                    f"{first or 'less'}; all must be alike. {MEND}"
                )
        if self.num_classes is not None and not 0 <= arrays["y"] < self.num_classes:
            raise ValueError(
                f"{self.where}: example {index}: label {arrays['y']} is out of range; labels must "
                f"lie in 0 to {self.num_classes - 1}."
            )


class Supervised:
    """Two features of each example of a source of dicts, as (x, y); pickled with the source."""

    def __init__(self, source: Any, x: str, y: str) -> None:
        self._source, self._x, self._y = source, x, y

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        example = self._source[index]
        return example[self._x], example[self._y]


def read_example(examples: Any, index: int, where: str) -> tuple[Any, Any]:
    """The (x, y) of one index. Raises ValueError where it cannot be read, or is no pair."""
    try:
        example = examples[index]
    except (Exception, SystemExit) as error:  # whatever the source raises
        raise ValueError(
            f"{where}: example {index} cannot be read: {one_line(error)}. {MEND}"
        ) from error
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise ValueError(
            f"{where}: example {index} is a {type(example).__name__}, but an example must be "
            "(x, y)."
        )
    return tuple(example)  # type: ignore[return-value]


def arrays_of(example: tuple[Any, Any], index: int, where: str) -> dict[str, np.ndarray]:
    """The arrays of an example by their paths; those of a dict in the order of its sorted keys.

    Raises:
        ValueError: a value is no array of numbers, such as bytes.
    """
    arrays = {}
    for path, value in (*_flat("x", example[0]), *_flat("y", example[1])):
        try:
            arrays[path] = np.asarray(value)
        except (ValueError, TypeError):  # such as a list of rows of different lengths
            arrays[path] = np.empty(0, object)
        if arrays[path].dtype.kind not in "biuf":
            raise ValueError(
                f"{where}: example {index}: {path} is a {type(value).__name__} of "
                f"{arrays[path].dtype}, but must be an array of real numbers."
            )
    return arrays


def leaves_of(arrays: dict[str, np.ndarray]) -> tuple[Leaf, ...]:
    """The shapes and dtypes of an example's arrays."""
    return tuple(Leaf(path, array.shape, array.dtype) for path, array in arrays.items())


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    # As in tf.data: dicts and tuples are structures, a list is an array.
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _flat(f"{path}[{key!r}]", value[key])
    elif isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from _flat(f"{path}[{place}]", part)
    else:
        yield path, value
