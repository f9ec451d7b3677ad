"""Examples that are read one by one when their turn comes: whatever has a length and an index."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from towers.app.datasets.dataset import Dataset, check_shapes
from towers.app.datasets.pixels import divided, divided_parts, notes
from towers.resume.source import Epoch, ExplainedBatches, InputOptions, as_written, of_batches
from towers.machine.words import counted
from towers.app.reading.array_records import ArrayRecords
from towers.app.reading.examples import Source, arrays_of, leaf_of, read_example
from towers.app.reading.readers import Readers

_DTYPES = {tf.float64: tf.float32, tf.int64: tf.int32}


@dataclass(frozen=True, eq=False)
class RandomAccess:
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
    is_sequential = False
    labels = None

    @property
    def shape(self) -> Any:
        """The shape of one x."""
        return tf.nest.map_structure(lambda spec: tuple(spec.shape), self.structure[0])

    def opened(self, options: InputOptions) -> "RandomAccess":
        readers = Readers(self.source, options.data_workers, options.data_timeout)
        return replace(self, readers=readers)

    def identity(self) -> Iterator[bytes]:
        """The dtypes and shapes of an example, and files' sizes: reading all would take long."""
        yield repr(self.source.leaves).encode()
        if isinstance(self.source.examples, ArrayRecords):
            yield from self.source.examples.identity()

    def batches(self, epoch: Epoch) -> ExplainedBatches:
        """The batches that arrays in memory would give."""
        batched = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), self.structure
        )
        failed: list[ValueError] = []  # why an iteration has ended early: tf.data tells less
        read = tf.data.Dataset.from_generator(
            partial(self._read, epoch.indices(self.num_examples), failed),
            output_signature=(tf.TensorSpec([None], tf.int64), *batched),
        )
        arrays = read.map(as_written(lambda index, x, y: (index, converted(x, y))))
        return ExplainedBatches(of_batches(arrays, epoch), partial(_explained, failed))

    def _read(self, indices: tf.data.Dataset, failed: list[ValueError]) -> Iterator[Any]:
        failed.clear()
        assert self.readers is not None
        try:
            if (length := len(self.source.examples)) != self.num_examples:
                raise ValueError(
                    f"{self.source.where}: {counted(length, 'example')} now, "
                    f"{self.num_examples:,} at the start. A run needs the same ones throughout: "
                    "restore them, or start a new run."
                )
            for index, arrays in self.readers.read(indices.as_numpy_iterator()):
                yield index, *tf.nest.pack_sequence_as(self.structure, arrays)
        except ValueError as error:
            failed.append(error)
            raise


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


def of_classes(name: str, train: Any, test: Any, num_classes: int | None) -> Dataset:
    """A data set of sources. Raises ValueError where they differ in shape, see `from_source`."""
    return of_sources(
        name,
        from_source(train, f"{name} (train)", num_classes),
        from_source(test, f"{name} (test)", num_classes),
        num_classes,
    )


def of_sources(
    name: str, train: RandomAccess, test: RandomAccess, num_classes: int | None
) -> Dataset:
    """A data set of two splits. Raises ValueError where they differ in shape."""
    check_shapes(name, train.shape, test.shape)
    found = notes(train.structure[0], test.structure[0])
    parts = divided_parts(train.structure[0])
    return Dataset(name, train, test, num_classes or 1, train.shape, found, divided=parts)


def of_any(source: Any, where: str) -> tuple[RandomAccess, Any]:
    """A split of any structure, and the specs of one x and one y; see `from_source`."""
    split = from_source(source, where, None, own_task=True)
    return split, split.structure


def converted(x: Any, y: Any) -> tuple[Any, Any]:
    """Batches as arrays in memory: pixels of x divided by 255, 64-bit numbers 32-bit."""
    return tf.nest.map_structure(_narrow, divided(x)), tf.nest.map_structure(_narrow, y)


def _explained(failed: list[ValueError], batches: tf.data.Dataset) -> Iterator[Any]:
    """Batches made of what readers give; an error of theirs is raised in their words."""
    try:
        yield from batches
    except tf.errors.OpError:
        if not failed:
            raise
        raise failed[0] from None


def _without_arrays(value: Any) -> Any:
    """The structure of an example; None for each array, also for a list."""
    if isinstance(value, dict):
        return {key: _without_arrays(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_without_arrays(part) for part in value)
    return None


def _narrow(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, _DTYPES.get(tensor.dtype, tensor.dtype))
