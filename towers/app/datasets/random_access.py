"""Reads examples by their index while training runs.

indices of a batch  ->  arrays [B, ...]  ->  the batches that arrays in memory would give
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from towers.app.datasets.dataset import Found, other_length
from towers.app.datasets.pixels import divided, divided_parts
from towers.app.reading.examples import Source, read_example
from towers.app.reading.readers import Readers
from towers.app.config import TrainConfig
from towers.app.datasets.source import DataSource, ExplainedBatches, of_batches
from towers.resume.epoch import Epoch, as_written
from towers.step.structures import Structure

_DTYPES = {tf.float64: tf.float32, tf.int64: tf.int32}


@dataclass(frozen=True, eq=False)
class RandomAccess(DataSource):
    """Reads a split of N examples while training runs."""

    source: Source
    structure: tuple[Structure, Structure]  # specs of (x, y), as the source gives one example
    num_examples: int
    readers: Readers | None = None  # processes; None: the thread that makes the batches reads
    # An abandoned iterator may still read.
    lock: threading.Lock = field(default_factory=threading.Lock)

    how = "read while training runs"
    reads_rows = True
    labels = None

    def opened(self, config: TrainConfig) -> "RandomAccess":
        if not config.data_workers:
            return self
        return replace(self, readers=Readers(self.source, config.data_workers))

    def identity(self) -> Iterator[bytes]:
        """Yields dtypes and shapes: reading all examples would take long."""
        yield repr(self.source.leaves).encode()

    def batches(self, epoch: Epoch) -> ExplainedBatches:
        """Returns the batches that arrays in memory would give. Iterating may raise ValueError."""
        failed: list[ValueError] = []  # the reader's error, of which tf.data shows only a part
        indices = epoch.indices(self.num_examples)

        def generate() -> Iterator[tuple[Structure, ...]]:
            failed.clear()
            try:
                for index, arrays in self._read(indices.as_numpy_iterator()):
                    if index.min() < 0:  # rows that another worker reads become 0
                        read = [np.zeros((len(index), *a.shape[1:]), a.dtype) for a in arrays]
                        for whole, rows in zip(read, arrays, strict=True):
                            whole[index >= 0] = rows
                        arrays = read
                    yield index, *tf.nest.pack_sequence_as(self.structure, arrays)
            except ValueError as error:
                failed.append(error)
                raise

        def explain(num_done: int) -> None:
            if failed:
                raise failed[0] from None

        signature = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype),
            (tf.TensorSpec([], tf.int64), *self.structure),
        )
        batches = tf.data.Dataset.from_generator(generate, output_signature=signature)
        pixels = divided_parts(self.structure[0])

        @as_written
        def converted(
            index: tf.Tensor, x: Structure, y: Structure
        ) -> tuple[tf.Tensor, tuple[Structure, Structure]]:
            return index, tf.nest.map_structure(
                lambda part: tf.cast(part, _DTYPES.get(part.dtype, part.dtype)),
                (divided(x, pixels), y),
            )

        return ExplainedBatches(of_batches(batches.map(converted), epoch), explain)

    def _read(self, batches: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Yields the indices of each batch, and the arrays of the examples that are needed."""
        if (length := len(self.source.examples)) != self.num_examples:
            raise other_length(self.source.where, length, self.num_examples)
        if self.readers is not None:
            yield from self.readers.read(batches)
            return
        for indices in batches:
            with self.lock:
                arrays = self.source.read(indices[indices >= 0])
            yield indices, arrays


def split_of(examples: Any, where: str, num_classes: int | None, custom_loss: bool) -> Found:
    """Makes a split of a source of (x, y), whose examples have the structure of the first one."""
    count = len(examples)
    if count == 0:
        raise ValueError(f"{where}: no examples; give at least one.")
    example, arrays = read_example(examples, 0, where)
    *_, label = leaves = tuple(arrays)
    is_label = not custom_loss and label[:2] == ("y", ()) and label.dtype.kind in "iu"
    if is_label and num_classes is None:
        raise ValueError(
            f"{where}: y is a label, and counting the classes would take long: add NUM_CLASSES = N "
            "beside the function."
        )
    structure = tf.nest.map_structure(lambda a: tf.TensorSpec(a.shape, a.dtype), example)
    source = Source(examples, where, leaves, num_classes if is_label else None)
    return RandomAccess(source, structure, count), structure, num_classes or 1
