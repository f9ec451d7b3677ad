"""One example of a source -> its arrays, in one order; all examples look like the first one.

    (x, {"b": y, "a": z})   ->   x, y['a'], y['b']
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from towers.app.named import one_line

_MEND = "Mend it; `resume` then goes on from there."
_PAIR = "an example must be (x, y)"


class Leaf(NamedTuple):
    """One array of every example.

    path: such as "x" or "y['a']".
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype


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
        self, indices: Sequence[int], begin: Callable[[int], None] | None = None
    ) -> list[np.ndarray]:
        """Some of the examples, one array [N, ...] for each leaf.

        Args:
            indices: which, in this order.
            begin: is told each index before it is read.

        Raises:
            ValueError: an example cannot be read, or is unlike the first one (naming its index).
        """
        stacked = [np.empty((len(indices), *leaf.shape), leaf.dtype) for leaf in self.leaves]
        for row, index in enumerate(map(int, indices)):
            if begin is not None:
                begin(index)
            for array, value in zip(stacked, self._read_one(index), strict=True):
                array[row] = value
        return stacked

    def _read_one(self, index: int) -> list[np.ndarray]:
        arrays = arrays_of(read_example(self.examples, index, self.where), index, self.where)
        for (path, array), leaf in zip(arrays, self.leaves, strict=False):
            if path != leaf.path or array.shape != leaf.shape or array.dtype != leaf.dtype:
                raise self._unlike(index, _described(leaf_of(path, array)), _described(leaf))
        if len(arrays) != len(self.leaves):
            raise self._unlike(index, f"{len(arrays)} arrays", f"{len(self.leaves)}")
        label = arrays[-1][1]
        if self.num_classes is not None and not 0 <= label < self.num_classes:
            raise ValueError(
                f"{self.where}: example {index}: label {label} is out of range; labels must lie "
                f"in 0 to {self.num_classes - 1}."
            )
        return [array for _, array in arrays]

    def _unlike(self, index: int, now: str, first: str) -> ValueError:
        return ValueError(
            f"{self.where}: example {index} holds {now}, but example 0 held {first}; all must be "
            f"alike. {_MEND}"
        )


def read_example(examples: Any, index: int, where: str) -> tuple[Any, Any]:
    """The (x, y) of one index. Raises ValueError where it cannot be read, or is no pair."""
    try:
        example = examples[index]
    except (Exception, SystemExit) as error:  # whatever the source raises
        raise ValueError(
            f"{where}: example {index} cannot be read: {one_line(error)}. {_MEND}"
        ) from error
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise ValueError(
            f"{where}: example {index} is a {type(example).__name__}, but {_PAIR}."
        )
    return tuple(example)  # type: ignore[return-value]


def arrays_of(example: tuple[Any, Any], index: int, where: str) -> list[tuple[str, np.ndarray]]:
    """Each array of an example with its path; those of a dict in the order of its sorted keys.

    Raises:
        ValueError: a value is no array of numbers, or bytes.
    """
    arrays = []
    for path, value in (*_leaves("x", example[0]), *_leaves("y", example[1])):
        try:
            array = np.asarray(value)
        except (ValueError, TypeError):  # such as a list of rows of different lengths
            array = np.empty(0, object)
        if array.dtype.kind not in "biuf":
            raise ValueError(
                f"{where}: example {index}: {path} is a {type(value).__name__} of "
                f"{array.dtype}, but must be an array of real numbers."
            )
        arrays.append((path, array))
    return arrays


def leaf_of(path: str, array: np.ndarray) -> Leaf:
    """The shape and dtype of an array."""
    return Leaf(path, array.shape, array.dtype)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    # As in tf.data: dicts and tuples are structures, a list is an array.
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _leaves(f"{path}[{key!r}]", value[key])
    elif isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from _leaves(f"{path}[{place}]", part)
    else:
        yield path, value


def _described(leaf: Leaf) -> str:
    return f"{leaf.path} of {leaf.dtype.name} and shape {leaf.shape}"
