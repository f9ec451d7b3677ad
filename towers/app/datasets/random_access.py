"""Examples that are read by their index when their turn comes: whatever has a length and an index.

    indices of a batch  ->  arrays [B, ...]  ->  the batches that arrays in memory would give
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from towers.app.datasets.dataset import Found
from towers.app.datasets.pixels import divided
from towers.app.reading.array_records import ArrayRecords
from towers.app.reading.examples import Source, arrays_of, leaves_of, read_example
from towers.app.reading.readers import Readers
from towers.machine.words import counted
from towers.resume.source import (
    DataSource,
    Epoch,
    ExplainedBatches,
    InputOptions,
    as_written,
    of_batches,
)

_DTYPES = {tf.float64: tf.float32, tf.int64: tf.int32}


@dataclass(frozen=True, eq=False)
class RandomAccess(DataSource):
    """N examples that stay where they are: a split that is read while training runs.

    source: what is read, and what each example looks like.
    structure: (x, y) of tf.TensorSpec, as the source gives one example.
    num_examples: N.
    readers: of the source, once it is opened.
    """

    source: Source
    structure: Any
    num_examples: int
    readers: Readers | None = None

    how = "read while training runs"
    labels = None

    def opened(self, options: InputOptions) -> "RandomAccess":
        readers = Readers(self.source, options.data_workers, options.data_timeout)
        return replace(self, readers=readers)

    def identity(self) -> Iterator[bytes]:
        """The dtypes and shapes of an example, and files' sizes: reading all would take long."""
        yield repr(self.source.leaves).encode()
        if isinstance(self.source.examples, ArrayRecords):
            yield from self.source.examples.identity()

    def batches(self, epoch: Epoch) -> ExplainedBatches:
        """The batches that arrays in memory would give; a `ValueError` of a reader is raised."""
        failed: list[ValueError] = []  # why an iteration has ended early: tf.data tells less
        indices = epoch.indices(self.num_examples)

        def generate() -> Iterator[Any]:
            failed.clear()
            try:
                for index, arrays in self._read(indices.as_numpy_iterator()):
                    yield index, *tf.nest.pack_sequence_as(self.structure, arrays)
            except ValueError as error:
                failed.append(error)
                raise

        def explained(batches: tf.data.Dataset) -> Iterator[Any]:
            try:
                yield from batches
            except tf.errors.OpError:
                if not failed:
                    raise
                raise failed[0] from None

        x, y = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), self.structure
        )
        batches = tf.data.Dataset.from_generator(
            generate, output_signature=(tf.TensorSpec([None], tf.int64), x, y)
        )
        converted = batches.map(as_written(
            lambda index, x, y: (index, tf.nest.map_structure(_narrow, (divided(x), y)))
        ))
        return ExplainedBatches(of_batches(converted, epoch), explained)

    def _read(self, indices: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, Any]]:
        assert self.readers is not None
        if (length := len(self.source.examples)) != self.num_examples:
            raise ValueError(
                f"{self.source.where}: {counted(length, 'example')} now, {self.num_examples:,} at "
                "the start. A run needs the same ones throughout: restore them, or start a new "
                "run."
            )
        return self.readers.read(indices)


def split_of(examples: Any, where: str, num_classes: int | None, own_task: bool) -> Found:
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
    leaves = leaves_of(arrays_of(example, 0, where))
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
    return RandomAccess(source, structure, count), structure, num_classes or 1


def _without_arrays(value: Any) -> Any:
    """The structure of an example; None for each array, also for a list."""
    if isinstance(value, dict):
        return {key: _without_arrays(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_without_arrays(part) for part in value)
    return None


def _narrow(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, _DTYPES.get(tensor.dtype, tensor.dtype))
