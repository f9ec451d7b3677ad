"""Examples that are read one by one when their turn comes: whatever has a length and an index."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from towers.datasets.pixels import divided
from towers.reading.examples import Source, arrays_of, leaf_of, read_example
from towers.reading.readers import Readers

_DTYPES = {tf.float64: tf.float32, tf.int64: tf.int32}


@dataclass(frozen=True, eq=False)
class RandomAccess:
    """N examples that stay where they are: a split that is read while training runs.

    source: what is read, and what each example looks like.
    structure: (x, y) of tf.TensorSpec, as the source gives one example.
    num_examples: N.
    """

    source: Source
    structure: Any
    num_examples: int

    @property
    def shape(self) -> Any:
        """Of one x."""
        return tf.nest.map_structure(lambda spec: tuple(spec.shape), self.structure[0])

    def check_length(self) -> None:
        """Raises ValueError where the source has another length than before."""
        length = len(self.source.examples)
        if length != self.num_examples:
            raise ValueError(
                f"{self.source.where}: {length:,} examples now, {self.num_examples:,} at the "
                "start. A run needs the same ones throughout: restore them, or start a new run."
            )


def is_random_access(value: object) -> bool:
    """Whether a value has a length and an index; lists and tuples have, but are arrays or pairs."""
    has_both = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return has_both and not isinstance(value, tuple | list | dict | str | bytes | np.ndarray)


def from_source(
    examples: Any, where: str, num_classes: int | None, own_task: bool = False
) -> RandomAccess:
    """A split of a source, whose first example says what all of them look like.

    Args:
        examples: `len(examples)` of them, `examples[index]` is (x, y): arrays, or dicts and tuples
            of these.
        where: what they are, for the errors.
        num_classes: where y is one integer, the number of labels.
        own_task: y is what the model's own loss takes.

    Raises:
        ValueError: there is none, the first one cannot be read or is no (x, y), or its label needs
            num_classes.
    """
    count = len(examples)
    if count == 0:
        raise ValueError(f"{where}: no examples; give at least one.")
    example = read_example(examples, 0, where)
    arrays = arrays_of(example, 0, where)
    leaves = tuple(leaf_of(path, array) for path, array in arrays)
    *_, label = leaves
    is_label = label.path == "y" and label.shape == () and np.issubdtype(label.dtype, np.integer)
    is_label = is_label and not own_task
    if is_label and num_classes is None:
        raise ValueError(
            f"{where}: y is a label, and reading all of them to count the classes would take "
            "long: add NUM_CLASSES = N beside the function."
        )
    structure = tf.nest.pack_sequence_as(
        _without_arrays(example), [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
    )
    source = Source(examples, where, leaves, num_classes if is_label else None)
    return RandomAccess(source, structure, count)


def converted(x: Any, y: Any) -> tuple[Any, Any]:
    """Batches as arrays in memory: pixels of x divided by 255, 64-bit numbers 32-bit."""
    return tf.nest.map_structure(_narrow, divided(x)), tf.nest.map_structure(_narrow, y)


@dataclass(frozen=True, eq=False)
class ReadBatches:
    """The batches of a source; what its readers refuse is raised as they word it.

    feed: reads.
    batches: (x [B, ...], y [B, ...]), made of what it reads.
    """

    feed: "Feed"
    batches: tf.data.Dataset

    @property
    def element_spec(self) -> Any:
        return self.batches.element_spec

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.batches
        except tf.errors.OpError:
            if self.feed.error is None:
                raise
            raise self.feed.error from None


class Feed:
    """Batches of indices -> a tf.data.Dataset of (indices, x, y); nothing of the source's order.

    error: why the last iteration has ended early, if it did: tf.data tells less.
    """

    def __init__(self, split: RandomAccess, readers: Readers, indices: tf.data.Dataset) -> None:
        self._split, self._readers, self._indices = split, readers, indices
        self.error: ValueError | None = None

    def dataset(self) -> tf.data.Dataset:
        """Yields each batch when it has been read."""
        batched = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), self._split.structure
        )
        signature = (tf.TensorSpec([None], tf.int64), *batched)
        return tf.data.Dataset.from_generator(self._read, output_signature=signature)

    def _read(self) -> Iterator[tuple[np.ndarray, Any, Any]]:
        self.error = None
        try:
            self._split.check_length()
            for indices, arrays in self._readers.read(self._indices.as_numpy_iterator()):
                x, y = tf.nest.pack_sequence_as(self._split.structure, arrays)
                yield indices, x, y
        except ValueError as error:
            self.error = error
            raise


def _without_arrays(value: Any) -> Any:
    """The structure of an example; None for each array, also for a list."""
    if isinstance(value, dict):
        return {key: _without_arrays(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_without_arrays(part) for part in value)
    return None


def _narrow(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, _DTYPES.get(tensor.dtype, tensor.dtype))
