"""Reads a tf.data.Dataset, which is cached in memory by the first epoch, or read in each epoch.

    examples -> indices -> shuffled -> examples of completed steps skipped -> pixels divided

A dataset that is not cached is shuffled within a buffer.
"""

import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import keras
import numpy as np
import tensorflow as tf

from towers.app.datasets.dataset import (
    Found,
    MEMORY_SHARE,
    describe,
    fits,
    is_pair,
    other_length,
    usable_memory,
)
from towers.app.datasets.pixels import divided, divided_parts
from towers.app.reading.examples import MEND
from towers.machine.devices import count_cores
from towers.app.config import TrainConfig
from towers.app.datasets.source import (
    DataSource,
    ExplainedBatches,
    count_elements,
    of_examples,
    read_through,
    with_x,
)
from towers.resume.epoch import Epoch
from towers.step.structures import Structure, is_composite

# Lengths of datasets: a run needs them several times, and TensorFlow may have to read all to count.
_counts: "weakref.WeakKeyDictionary[tf.data.Dataset, int]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Streamed(DataSource):
    """Reads a split of N examples, one after the other; errors call it `where`.

    given: an unbatched tf.data.Dataset of (x, y).
    """

    given: tf.data.Dataset
    where: str
    num_examples: int
    shuffle_buffer: int = 1

    labels = None

    @property
    def how(self) -> str:
        buffer = min(self.shuffle_buffer, self.num_examples)
        return f"streamed while training runs, shuffled among {buffer:,}"

    def opened(self, config: TrainConfig) -> "Streamed":
        """Sets the shuffle buffer. Raises ValueError if it takes over a quarter of the memory."""
        buffer, size = config.shuffle_buffer, _example_bytes(self.given)
        if size is not None and not fits(size * min(buffer, self.num_examples)):
            most = max(1, int(MEMORY_SHARE * usable_memory() / size))
            raise ValueError(
                f"shuffle_buffer ({buffer}): so many examples of {size:,} bytes take more than "
                f"{MEMORY_SHARE:.0%} of the memory; use at most shuffle_buffer={most}."
            )
        return replace(self, given=self.given.take(self.num_examples), shuffle_buffer=buffer)

    def identity(self) -> Iterator[bytes]:
        """Yields an example's specs; "streamed" tells its order from the order in memory."""
        yield f"streamed\0{self._divided(self.given.enumerate()).element_spec[1]}\0".encode()

    def batches(self, epoch: Epoch) -> ExplainedBatches:
        has_all = tf.data.experimental.assert_cardinality(self.num_examples)
        examples = self.given.enumerate().apply(has_all)
        if epoch.seed is not None:
            examples = examples.shuffle(self.shuffle_buffer, epoch.key, False)
        left = self._divided(examples.skip(epoch.start_step * epoch.batch_size))
        specs = tf.nest.flatten(self.given.element_spec)
        is_ragged = any(isinstance(spec, tf.RaggedTensorSpec) for spec in specs)
        return ExplainedBatches(of_examples(left, epoch, is_ragged), lambda _: self._find_fault())

    def _divided(self, examples: tf.data.Dataset) -> tf.data.Dataset:
        """Divides pixels in pairs (index, (x, y)), on all cores, in order."""
        parts = divided_parts(keras.utils.unpack_x_y_sample_weight(self.given.element_spec)[0])
        if not any(parts):
            return examples

        def example(index: tf.Tensor, given: Structure) -> tuple[tf.Tensor, Structure]:
            return index, with_x(given, lambda x: divided(x, parts))

        return examples.map(example, count_cores(), deterministic=True)

    def _find_fault(self) -> None:
        """Raises ValueError if an example cannot be read, or is missing."""
        count = 0
        try:
            for _ in self.given:
                count += 1
        except Exception as error:  # the user's function may raise anything
            what = f"example {count} cannot be read: {cause(error)}"
            raise ValueError(f"{self.where}: {what}. {MEND}") from None
        if count < self.num_examples:
            raise other_length(self.where, count, self.num_examples)


class Cached(Streamed):
    """Caches a split of N examples in memory in the first epoch, and shuffles all of them."""

    how = ""

    @property
    def labels(self) -> np.ndarray:  # type: ignore[override]
        labels = self.given.map(lambda x, y: y)
        return np.concatenate(list(read_through(labels, f"reading the labels of {self.where}")))

    def opened(self, config: TrainConfig) -> "Cached":
        # No take(N) may follow the cache: if TensorFlow does not know the length, the cache is
        # complete once its end has been read.
        cached = self.given.take(self.num_examples).cache()
        return replace(self, given=cached, shuffle_buffer=self.num_examples)

    def identity(self) -> Iterator[bytes]:
        yield str(self._divided(self.given.enumerate()).element_spec[1]).encode()


def from_dataset(dataset: tf.data.Dataset) -> Streamed:
    """Makes the source of a tf.data.Dataset, cached if it surely fits into 1/4 of the memory."""
    where = "the tf.data.Dataset"
    (count, _), size = _count(dataset, where), _example_bytes(dataset)
    if size is not None and fits(count * size):
        return Cached(dataset, where, count)
    return Streamed(dataset, where, count)


def split_of(
    given: tf.data.Dataset, where: str, num_classes: int | None, custom_loss: bool
) -> Found:
    """Makes a split of a tf.data.Dataset, whose specs are checked and whose values are not."""
    spec = given.element_spec
    for part in tf.nest.flatten(spec):
        is_tensor = isinstance(part, tf.TensorSpec) or is_composite(part)
        if not is_tensor or not (part.dtype.is_numeric or part.dtype.is_bool):
            raise ValueError(
                f"{where}: elements hold {part}, but must hold numbers: dense, ragged or sparse."
            )
    x, y, _ = keras.utils.unpack_x_y_sample_weight(spec)
    if not custom_loss:
        if not is_pair(spec) or not all(isinstance(part, tf.TensorSpec) for part in spec):
            raise ValueError(f"{where}: its elements must be (x, y), not {describe(spec)}.")
        if y.shape.rank != 0 or not y.dtype.is_integer:
            raise ValueError(
                f"{where}: y is {y.dtype.name} of shape {y.shape}, but must be one integer; if it "
                "is batched, add .unbatch()."
            )
        if not x.shape.is_fully_defined():
            raise ValueError(f"{where}: x has the unknown shape {x.shape}; use tf.ensure_shape.")
    _, found = _count(given, where, with_classes=not custom_loss and num_classes is None)
    return given, (x, y), num_classes or found


def _count(dataset: tf.data.Dataset, where: str, with_classes: bool = False) -> tuple[int, int]:
    """Returns the number of examples, and 1 + the largest label or 1; may read the dataset once."""
    count, num_classes = _counts.get(dataset, int(dataset.cardinality())), 1
    if count == tf.data.INFINITE_CARDINALITY:
        raise ValueError(f"{where}: it repeats forever: remove .repeat(), or end it by .take(N).")
    if with_classes:
        what = f"counting the examples and classes of {where}"
        labels = np.concatenate([[0], *read_through(dataset.map(lambda x, y: y), what)])
        if labels.min() < 0:
            raise ValueError(f"{where}: label {labels.min()} is out of range; 0 is the first.")
        count, num_classes = len(labels) - 1, int(labels.max()) + 1
    elif count < 0:
        count = count_elements(dataset, f"counting the examples of {where}")
    if count == 0:
        raise ValueError(f"{where}: no examples; give at least one.")
    _counts[dataset] = count
    return count, num_classes


def _example_bytes(dataset: tf.data.Dataset) -> int | None:
    """Returns the bytes of one example; None if they are unknown, as for text or ragged tensors."""
    specs = tf.nest.flatten(dataset.element_spec)
    for spec in specs:
        is_dense = isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined()
        if not is_dense or spec.dtype in (tf.string, tf.resource, tf.variant):
            return None
    return sum(spec.shape.num_elements() * spec.dtype.size for spec in specs)


def cause(error: Exception) -> str:
    """Returns the message of a TensorFlow error in one line, without the names of operations."""
    text = " ".join(str(getattr(error, "message", error)).split())
    # TensorFlow adds names of operations before and after the message.
    return re.sub(r"\{\{.*?\}\}|.*::\S+|\[(\[|Op:).*", "", text).strip(" .")
