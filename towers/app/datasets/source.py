"""DataSource gives the examples of one split, from any step of an epoch on."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from towers.app.config import TrainConfig
from towers.machine.devices import count_cores
from towers.machine.terminal import Lines
from towers.resume.epoch import Epoch, as_written, content_of
from towers.step.structures import BatchTensor, Structure, gather_rows

_ROWS = 16  # elements per batch: little Python time, and a slow source still shows progress


def count_elements(dataset: tf.data.Dataset, what: str) -> int:
    """Counts the elements of a dataset. `what` begins the lines on stderr."""
    return sum(map(len, read_through(dataset.map(lambda *_: 0), what)))


def read_through(values: tf.data.Dataset, what: str) -> Iterator[np.ndarray]:
    """Yields a dataset's elements, numbers of one shape, in small batches; prints the progress.

    `what` begins the lines on stderr: "counting the examples of mine (train)".
    """
    count, advice = 0, ""
    if int(values.cardinality()) == tf.data.UNKNOWN_CARDINALITY:
        advice = "; if it has no end, end it with .take(N)"
    lines = Lines(what, advice)
    for batch in values.batch(_ROWS):
        count += len(batch)
        yield batch.numpy()
        lines.show(count)


_PREFETCHED_BATCHES = 2  # the next batch is ready when a step ends; more batches only take memory


@dataclass(frozen=True)
class ExplainedBatches:
    """Yields the batches of a tf.data.Dataset, and explains TensorFlow's errors."""

    dataset: tf.data.Dataset
    explain: Callable[[int], None]  # (batches before an error); ValueError if it knows the reason

    @property
    def element_spec(self) -> Structure:
        return self.dataset.element_spec

    def map(self, function: Callable[..., Structure]) -> "ExplainedBatches":
        return replace(self, dataset=self.dataset.map(function))

    def __iter__(self) -> Iterator[Structure]:
        num_done = 0
        try:
            for batch in self.dataset:
                yield batch
                num_done += 1
        except tf.errors.OpError:
            self.explain(num_done)
            raise


Batches: TypeAlias = "tf.data.Dataset | ExplainedBatches"


class DataSource:
    """Gives the examples of one split."""

    reads_rows = False  # whether it has an index, and so can obey `Epoch.rows`
    num_examples: int  # N
    # All labels in the order of the split; None if they can only be read one by one.
    labels: BatchTensor | None

    @property
    def how(self) -> str:
        """Tells the user how examples are read in training. It is "" for examples in memory."""
        return ""

    def opened(self, config: TrainConfig) -> "DataSource":
        """Returns the source with its readers or its tensors, ready for a run."""
        return self

    def identity(self) -> Iterable[bytes | memoryview]:
        """Returns bytes that, with the number of examples, identify the examples."""
        raise NotImplementedError

    def batches(self, epoch: Epoch) -> Batches:
        """Returns (x [B, ...], y [B, ...]) for each step that is left. The last may be shorter."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class InMemory(DataSource):
    """Holds N examples in memory; `opened` makes tensors on the CPU."""

    parts: tuple[Structure, ...]  # (x [N, ...], y [N]), or structures of such arrays

    reads_rows = True

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        return int(tf.nest.flatten(self.parts)[-1].shape[0])

    @property
    def labels(self) -> BatchTensor:  # type: ignore[override]
        return self.parts[1]

    def opened(self, config: TrainConfig) -> "InMemory":
        with tf.device("/cpu:0"):
            tensors = tf.nest.map_structure(
                tf.convert_to_tensor, self.parts, expand_composites=True
            )
        return InMemory(tensors)

    def identity(self) -> Iterable[bytes | memoryview]:
        return content_of(self.parts)

    def batches(self, epoch: Epoch) -> tf.data.Dataset:
        # The function captures the tensors: constants are limited to protobuf's 2 GB.
        def rows(index: tf.Tensor) -> tuple[tf.Tensor, Structure]:
            place = tf.maximum(index, ~index)
            return index, tf.nest.map_structure(lambda part: gather_rows(part, place), self.parts)

        return of_batches(epoch.indices(self.num_examples, rows), epoch)


def of_batches(batches: tf.data.Dataset, epoch: Epoch) -> tf.data.Dataset:
    """Makes the batches of an epoch from pairs (index [B], example [B, ...])."""
    if epoch.change is not None:
        return of_examples(batches.unbatch(), epoch)
    return prepare_ahead(batches.map(as_written(lambda index, batch: batch)))


def of_examples(
    examples: tf.data.Dataset, epoch: Epoch, is_ragged: bool = False
) -> tf.data.Dataset:
    """Makes the batches, or ragged ones, of pairs (index, example), and changes x on all cores."""
    if (change := epoch.change) is None:
        plain = examples.map(as_written(lambda index, example: example))
    else:
        changed = as_written(lambda index, example: with_x(example, partial(change, index)))
        plain = examples.map(changed, count_cores(), deterministic=True)
    if is_ragged:
        return prepare_ahead(plain.ragged_batch(epoch.batch_size), count_cores())
    return prepare_ahead(plain.batch(epoch.batch_size), count_cores())


def with_x(example: Structure, change: Callable[[Structure], Structure]) -> Structure:
    """Changes x in an example or a batch, which is x or a tuple that begins with x."""
    if isinstance(example, tuple):
        return change(example[0]), *example[1:]
    return change(example)


def prepare_ahead(batches: tf.data.Dataset, num_threads: int = 1) -> tf.data.Dataset:
    """Prefetches the batches in order, in a private thread pool that towers do not use."""
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = num_threads
    options.autotune.enabled = False
    # Graph rewriting would copy the captured tensors in each epoch.
    options.experimental_optimization.apply_default_optimizations = False
    return batches.prefetch(_PREFETCHED_BATCHES).with_options(options)
