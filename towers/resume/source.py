"""DataSource: what examples come from, and the part of an epoch that is read of them.

    in memory, tf_data, image_files, random_access (ArrayRecord too), stateful, record_files
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from towers.machine.devices import count_cores
from towers.step.tensor_rows import gather_rows

_PREFETCHED_BATCHES = 2  # the next one is ready when a step ends; more only take memory

# AutoGraph would rewrite a function of tf.data's for 0.05 s, in every process anew.
as_written = tf.autograph.experimental.do_not_convert

Order = Callable[[tf.Tensor], tf.Tensor]  # a permutation of 0 ... N - 1


class InputOptions(NamedTuple):
    """The configuration's options of reading and changing examples.

    augment: see `augment.load`; of training examples alone.
    data_workers: processes that read a random-access source; 0: a thread.
    data_timeout: seconds that one of its examples may take.
    shuffle_buffer: examples among which a streamed tf.data.Dataset is shuffled.
    """

    augment: str | None = None
    data_workers: int = 0
    data_timeout: float = 300.0
    shuffle_buffer: int = 10_000


class Epoch(NamedTuple):
    """The part of an epoch that is left; by default all of it, unchanged and in the split's order.

    batch_size: B, the global batch.
    start_step: the steps that are already done.
    order: of a number of examples, or of files, their permutation.
    key: of shuffling within a buffer; None: not shuffled.
    change: (index, x) -> x, of each example; None: as it is.
    number: of the epoch, from 0.
    """

    batch_size: int
    start_step: int = 0
    order: Callable[[int], Order] = lambda count: lambda positions: positions
    key: int | None = None
    change: Callable[[tf.Tensor, Any], Any] | None = None
    number: int = 0

    def indices(self, num_examples: int) -> tf.data.Dataset:
        """int64 [B] for each batch: order(start_step * B), ..., order(N - 1)."""
        order, size = self.order(num_examples), self.batch_size

        @as_written
        def indices_of(step: tf.Tensor) -> tf.Tensor:
            begin = step * size
            return order(tf.range(begin, tf.minimum(begin + size, num_examples)))

        steps = tf.data.Dataset.range(self.start_step, num_steps(num_examples, size))
        return steps.map(indices_of)


@dataclass(frozen=True)
class ExplainedBatches:
    """The batches of a tf.data.Dataset, with the reason where one of them cannot be made.

    dataset: yields the batches.
    explain: takes the number of batches before an error of TensorFlow. It raises ValueError if it
        knows the reason.
    """

    dataset: tf.data.Dataset
    explain: Callable[[int], None]

    @property
    def element_spec(self) -> Any:
        return self.dataset.element_spec

    def enumerate(self, start: int) -> "ExplainedBatches":
        return replace(self, dataset=self.dataset.enumerate(start))

    def map(self, function: Callable[..., Any]) -> "ExplainedBatches":
        return replace(self, dataset=self.dataset.map(function))

    def __iter__(self) -> Iterator[Any]:
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
    """The examples of one split.

    num_examples: N.
    labels: all of them, in the split's own order; None where each would have to be read.
    """

    num_examples: int
    labels: Any

    @property
    def how(self) -> str:
        """What happens to them while training runs, for the user; "" for examples in memory."""
        return ""

    @property
    def is_sequential(self) -> bool:
        """Whether an epoch that begins later reads, and leaves out, what comes before."""
        return False

    def opened(self, options: InputOptions) -> "DataSource":
        """The source as a run reads it: in memory, or with what reads it."""
        return self

    def identity(self) -> Iterable[Any]:
        """The bytes, beside their number, by which the examples are told from others."""
        raise NotImplementedError

    def batches(self, epoch: Epoch) -> Batches:
        """(x [B, ...], y [B, ...]) for each step that is left; the last may be shorter."""
        raise NotImplementedError

    def state(self, epoch: int, examples_done: int) -> Any:
        """The state to save with a checkpoint, as JSON values; None where the place says all.

        Args:
            epoch: complete epochs.
            examples_done: of the epoch under way; or more, where all of them are.
        """
        return None

    def go_on(self, epoch: int, examples_done: int, saved: Any) -> None:
        """Takes what `state` returned, for reading that begins there."""


@dataclass(frozen=True, eq=False)
class InMemory(DataSource):
    """N examples in memory.

    parts: (x [N, ...], y [N]), or structures of such arrays; tensors on the CPU once opened.
    """

    parts: tuple[Any, ...]

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        return int(tf.nest.flatten(self.parts)[-1].shape[0])

    @property
    def labels(self) -> Any:
        return self.parts[1]

    def opened(self, options: InputOptions) -> "InMemory":
        with tf.device("/cpu:0"):
            tensors = tf.nest.map_structure(
                tf.convert_to_tensor, self.parts, expand_composites=True
            )
        return InMemory(tensors)

    def identity(self) -> Iterator[Any]:
        """All that they hold; None is nothing."""
        for part in tf.nest.flatten(self.parts, expand_composites=True):
            if part is not None:
                values = part.numpy().reshape(-1)
                yield f"{part.dtype.name} {part.shape}".encode()
                yield b"\0".join(values) if part.dtype == tf.string else values.view(np.uint8).data

    def batches(self, epoch: Epoch) -> tf.data.Dataset:
        parts = self.parts

        # The function captures the tensors; as constants they would be limited to protobuf's 2 GB.
        @as_written
        def rows(index: tf.Tensor) -> Any:
            return index, tf.nest.map_structure(lambda part: gather_rows(part, index), parts)

        return of_batches(epoch.indices(self.num_examples).map(rows), epoch)


def num_steps(num_examples: int, batch_size: int) -> int:
    """The global batches of an epoch; the last may be partial."""
    return -(-num_examples // batch_size)


def of_batches(batches: tf.data.Dataset, epoch: Epoch) -> tf.data.Dataset:
    """(index [B], example [B, ...]) for each batch -> the batches of an epoch."""
    if epoch.change is not None:
        return of_examples(batches.unbatch(), epoch)
    return prepare_ahead(batches.map(as_written(lambda index, batch: batch)))


def of_examples(
    examples: tf.data.Dataset,
    epoch: Epoch,
    num_threads: int | None = None,
    is_ragged: bool = False,
) -> tf.data.Dataset:
    """(index, example) -> the batches of an epoch; each x is changed, on all cores.

    Args:
        examples: (index, example); an example is x, or a tuple that begins with x, as Keras has it.
        epoch: of these.
        num_threads: that make batches of what is not changed; None: all cores.
        is_ragged: rows of ragged tensors come as tensors of any length.
    """
    if (change := epoch.change) is None:
        plain = examples.map(as_written(lambda index, example: example))
    else:

        @as_written
        def changed(index: tf.Tensor, example: Any) -> Any:
            return with_x(example, lambda x: change(index, x))

        plain, num_threads = examples.map(changed, count_cores(), deterministic=True), None
    batch = plain.ragged_batch if is_ragged else plain.batch
    return prepare_ahead(batch(epoch.batch_size), num_threads or count_cores())


def with_x(example: Any, change: Callable[[Any], Any]) -> Any:
    """An example or a batch, x or a tuple that begins with x, with that x changed."""
    if isinstance(example, tuple):
        return (change(example[0]), *example[1:])
    return change(example)


def prepare_ahead(batches: tf.data.Dataset, num_threads: int = 1) -> tf.data.Dataset:
    """The batches in their order, made ahead in threads of their own: not those of the towers."""
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = num_threads
    options.autotune.enabled = False
    # Rewriting the graph would copy the captured tensors, once an epoch.
    options.experimental_optimization.apply_default_optimizations = False
    return batches.prefetch(_PREFETCHED_BATCHES).with_options(options)


def shuffled(indices: tf.Tensor, seed: int, epoch: int | tf.Tensor, count: int) -> tf.Tensor:
    """The permutation of 0 ... count - 1 in one epoch, at some indices, all of one dtype."""
    key = tf.stack([tf.constant(seed, tf.int64), tf.cast(epoch, tf.int64)])
    return tf.random.experimental.index_shuffle(indices, key, tf.constant(count - 1, tf.int64))


def sha256(parts: Iterable[Any]) -> str:
    """SHA-256 of bytes, one after the other: a second for 2 GB."""
    result = hashlib.sha256()
    for part in parts:
        result.update(part)
    return result.hexdigest()
