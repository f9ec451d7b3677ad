"""Examples -> global batches, in an order that depends on the seed and the epoch alone.

    step s of epoch e  ->  examples shuffle(e, s * B), ..., shuffle(e, s * B + B - 1)

`tf.random.experimental.index_shuffle` gives the i-th index of a permutation without the ones
before it, so that an epoch can begin at any step at once. The batches stay in the CPU's memory:
a step cuts them into shards there and copies one shard to each device. Image files are decoded in
that same order while training runs, on all cores, and a random-access source is read in it. What
can only be streamed is shuffled within a buffer, in an order of the same seed and epoch.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from towers.datasets.augment import Augment, example_seed
from towers.datasets.augment import load as load_augment
from towers.datasets.dataset import Split
from towers.datasets.image_files import ImageFiles, check_decodable, decode
from towers.datasets.options import InputOptions
from towers.datasets.random_access import Feed, RandomAccess, ReadBatches, converted
from towers.datasets.streamed import (
    Order,
    Streamed,
    StreamedBatches,
    check_buffer,
    fits_into_memory,
)
from towers.machine.devices import count_cores
from towers.reading.readers import Readers

_PREFETCHED_BATCHES = 2  # the next one is ready when a step ends; more only take memory

# AutoGraph would rewrite a function of tf.data's for 0.05 s, in every process anew.
_as_written = tf.autograph.experimental.do_not_convert

Weigh = Callable[[Any, Any], tuple[Any, Any, tf.Tensor]]  # (x, y) -> (x, y, sample_weight)
_Change = Callable[[tf.Tensor, Any], Any]  # (index, x) -> x
Batches: TypeAlias = "tf.data.Dataset | DecodedBatches | ReadBatches | StreamedBatches"


class Examples(NamedTuple):
    """One split, in memory unless it is streamed.

    source: (x [N, ...], y [N]), or structures of such tensors, on the CPU, or a cached unbatched
        tf.data.Dataset, or image files, which are streamed: decoded when their turn comes; or what
        is read then.
    num_examples: N.
    augment: what changes an example in training, if anything does.
    readers: of a random-access source.
    shuffle_buffer: examples among which a streamed tf.data.Dataset is shuffled.
    weigh: what makes sample weights of the labels of a batch, if anything does.
    """

    source: "tuple[Any, ...] | tf.data.Dataset | ImageFiles | RandomAccess | Streamed"
    num_examples: int
    augment: Augment | None = None
    readers: Readers | None = None
    shuffle_buffer: int = 1
    weigh: Weigh | None = None

    @property
    def is_streamed(self) -> bool:
        return isinstance(self.source, ImageFiles | RandomAccess | Streamed)

    @property
    def is_sequential(self) -> bool:
        """Whether an epoch that begins later reads, and leaves out, what comes before."""
        return isinstance(self.source, tf.data.Dataset | Streamed)

    @property
    def how(self) -> str:
        """What happens to a streamed split, in words."""
        if isinstance(self.source, Streamed):
            buffer = f"{min(self.shuffle_buffer, self.num_examples):,}"
            return f"streamed while training runs, shuffled among {buffer}"
        what = "decoded" if isinstance(self.source, ImageFiles) else "read"
        return f"{what} while training runs"


@dataclass(frozen=True)
class DecodedBatches:
    """The batches of image files; the one that holds a file that is no image raises ValueError.

    files: the split.
    indices: int64 [B] for each batch: which files.
    batches: (x [B, ...], y [B]), decoded from these.
    """

    files: ImageFiles
    indices: tf.data.Dataset
    batches: tf.data.Dataset

    @property
    def element_spec(self) -> tuple[tf.TensorSpec, tf.TensorSpec]:
        return self.batches.element_spec

    def __iter__(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        done = 0
        try:
            for batch in self.batches:
                yield batch
                done += 1
        except tf.errors.OpError:  # it does not tell the file
            check_decodable(self.files, next(self.indices.skip(done).as_numpy_iterator()))
            raise


def load_examples(
    split: Split, num_examples: int, options: InputOptions = InputOptions()
) -> Examples:
    """Takes a split into memory, once for the whole run; but what is too large stays where it is.

    Args:
        split: arrays ([N, ...], [N]); or an unbatched tf.data.Dataset, which the first epoch
            caches where it takes at most a share of the memory; or what is read in its turn.
        num_examples: N.
        options: how examples are read, and changed in training.

    Raises:
        ValueError: see `augment.load` and `streamed.check_buffer`.
    """
    if isinstance(split, tf.data.Dataset) and not fits_into_memory(split, num_examples):
        split = Streamed(split, "the tf.data.Dataset", num_examples)
    readers = None
    if isinstance(split, tf.data.Dataset):
        source: Any = split.cache()
    elif isinstance(split, tuple):
        with tf.device("/cpu:0"):
            source = tf.nest.map_structure(_tensor, split)
    else:
        source = split
    if isinstance(split, Streamed):
        check_buffer(split, options.shuffle_buffer)
    if isinstance(split, RandomAccess):
        readers = Readers(split.source, options.data_workers, options.data_timeout)
    examples = Examples(source, num_examples, None, readers, options.shuffle_buffer)
    if options.augment is None:
        return examples
    x, _, _ = keras.utils.unpack_x_y_sample_weight(ordered_batches(examples, 1).element_spec)
    if any(isinstance(spec, tf.RaggedTensorSpec) for spec in tf.nest.flatten(x)):
        raise ValueError("augment needs examples of one shape, and x is ragged: leave it out.")
    spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape[1:], part.dtype), x)
    return examples._replace(augment=load_augment(options.augment, spec))


def _tensor(part: Any) -> Any:
    return part if isinstance(part, tf.RaggedTensor) else tf.convert_to_tensor(part)


def num_steps(num_examples: int, batch_size: int) -> int:
    """The global batches of an epoch; the last may be partial."""
    return -(-num_examples // batch_size)


def digest(examples: Examples) -> str:
    """SHA-256 of a split: a second for 2 GB.

    Of a tf.data.Dataset and of a random-access source only its shapes and its size. Of image files
    their names below their directory, their sizes in bytes and their labels, in order: the
    directory may be moved. Of files of records their names and sizes.

    Raises:
        ValueError: the size of an image file cannot be read.
    """
    source = examples.source
    result = hashlib.sha256(str(examples.num_examples).encode())
    if isinstance(source, tf.data.Dataset):
        spec = Streamed(source, "the tf.data.Dataset", examples.num_examples).element_spec
        result.update(str(spec).encode())
        return result.hexdigest()
    if isinstance(source, ImageFiles):
        for name, size, label in zip(source.names, source.sizes(), source.labels, strict=True):
            result.update(os.fsencode(f"{name}\0{size} {label}\0"))
        return result.hexdigest()
    if isinstance(source, RandomAccess):
        result.update(repr(source.source.leaves).encode())
        return result.hexdigest()
    if isinstance(source, Streamed):  # another order than the same examples have in memory
        for what in ("streamed", *source.identity()):
            result.update(os.fsencode(f"{what}\0"))
        return result.hexdigest()
    for part in tf.nest.flatten(source, expand_composites=True):
        result.update(f"{part.dtype.name} {part.shape}".encode())
        result.update(part.numpy().reshape(-1).view(np.uint8).data)
    return result.hexdigest()


def shuffled_batches(
    examples: Examples, batch_size: int, seed: int, epoch: int, start_step: int = 0
) -> Batches:
    """The global batches of one epoch, in its own order, changed by `examples.augment`.

    Args:
        examples: of the split.
        batch_size: B, the global batch.
        seed: of the run.
        epoch: from 0.
        start_step: the steps of this epoch that are already done.

    Returns:
        (x [B, ...], y [B]) for each step left; the last one may be shorter.
    """
    key = _mix(seed, epoch)

    def order(count: int) -> Order:
        return lambda positions: tf.random.experimental.index_shuffle(
            positions, tf.constant([seed, epoch], tf.int64), tf.constant(count - 1, tf.int64)
        )

    change = None if examples.augment is None else _seeded(examples.augment, key)
    if isinstance(examples.source, tf.data.Dataset | Streamed):
        batches = _streamed(examples, batch_size, start_step, order, key, change)
    else:
        ordered = order(examples.num_examples)
        batches = _indexed(examples, batch_size, start_step, ordered, change)
    return _weighed(batches, examples.weigh)


def ordered_batches(examples: Examples, batch_size: int) -> Batches:
    """The global batches of a split in its own order: (x [B, ...], y [B]), the last shorter."""
    if isinstance(examples.source, tf.data.Dataset | Streamed):
        batches = _streamed(examples, batch_size, 0, lambda count: lambda positions: positions)
    else:
        batches = _indexed(examples, batch_size, 0, lambda positions: positions)
    return _weighed(batches, examples.weigh)


def _weighed(batches: Batches, weigh: Weigh | None) -> Batches:
    """Batches of (x, y) with what each example counts; None: as they are."""
    if weigh is None:
        return batches
    if isinstance(batches, tf.data.Dataset):
        return batches.map(weigh)
    return replace(batches, batches=batches.batches.map(weigh))


def _indexed(
    examples: Examples,
    batch_size: int,
    start_step: int,
    order: Order,
    change: _Change | None = None,
) -> Batches:
    """Batches of the examples order(start_step * B), ..., order(N - 1)."""
    count, source = examples.num_examples, examples.source

    @_as_written
    def indices_of(step: tf.Tensor) -> tf.Tensor:
        begin = step * batch_size
        return order(tf.range(begin, tf.minimum(begin + batch_size, count)))

    indices = tf.data.Dataset.range(start_step, num_steps(count, batch_size)).map(indices_of)
    if isinstance(source, ImageFiles):
        return DecodedBatches(source, indices, _decoded(source, indices, batch_size, change))
    if isinstance(source, RandomAccess):
        assert examples.readers is not None
        feed = Feed(source, examples.readers, indices)
        return ReadBatches(feed, _read(feed.dataset(), batch_size, change))
    # The function captures the tensors; as constants they would be limited to protobuf's 2 GB.
    assert isinstance(source, tuple)

    @_as_written
    def rows(index: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda part: tf.gather(part, index), source)

    if change is None:
        return prepare_ahead(indices.map(rows))
    with_index = indices.unbatch().map(_as_written(lambda i: (i, rows(i))))
    return _one_by_one(with_index, batch_size, change)


def _streamed(
    examples: Examples,
    batch_size: int,
    start_step: int,
    order: Callable[[int], Order],
    key: int | None = None,
    change: _Change | None = None,
) -> Batches:
    """Batches of what comes one after the other.

    Args:
        examples: in memory, as a cached tf.data.Dataset, or streamed.
        batch_size: B.
        start_step: the steps of this epoch that are already done.
        order: of what has an order of its own, such as files.
        key: of the shuffling; None: not shuffled.
        change: see `shuffled_batches`.
    """
    source, count = examples.source, examples.num_examples
    in_memory = isinstance(source, tf.data.Dataset)
    split = Streamed(source, "the tf.data.Dataset", count) if in_memory else source
    assert isinstance(split, Streamed)
    records = split.ordered(order).take(count)
    if key is not None:
        buffer = count if in_memory else examples.shuffle_buffer
        records = records.shuffle(buffer, seed=key, reshuffle_each_iteration=False)
    records = records.skip(start_step * batch_size)
    parsed = split.parsed(records)
    if change is None:
        plain = parsed.map(_as_written(lambda index, example: example))
        # A ragged tensor's rows come as tensors of any length.
        batch = plain.ragged_batch if _is_ragged(split.records) else plain.batch
        batches = prepare_ahead(batch(batch_size), 1 if in_memory else count_cores())
    else:
        batches = _one_by_one(parsed, batch_size, change)
    if in_memory:
        return batches
    return StreamedBatches(split, records, batches, count - start_step * batch_size)


def _is_ragged(records: tf.data.Dataset) -> bool:
    specs = tf.nest.flatten(records.element_spec)
    return any(isinstance(spec, tf.RaggedTensorSpec) for spec in specs)


def _read(
    batches: tf.data.Dataset, batch_size: int, change: _Change | None
) -> tf.data.Dataset:
    """(indices, x, y) as a source gives them -> (x, y) as arrays in memory would be."""

    @_as_written
    def arrays(indices: tf.Tensor, x: Any, y: Any) -> tuple[tf.Tensor, Any]:
        return indices, converted(x, y)

    as_arrays = batches.map(arrays)
    if change is None:
        return prepare_ahead(as_arrays.map(_as_written(lambda indices, batch: batch)))
    return _one_by_one(as_arrays.unbatch(), batch_size, change)


def _decoded(
    files: ImageFiles, indices: tf.data.Dataset, batch_size: int, change: _Change | None
) -> tf.data.Dataset:
    """The batches of image files, decoded on all cores, one image by each."""
    with tf.device("/cpu:0"):
        paths, labels = tf.constant(files.paths), tf.constant(files.labels)

    @_as_written
    def image(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = decode(paths[index], files.shape)
        return x if change is None else change(index, x), labels[index]

    images = indices.unbatch().map(
        image,
        count_cores(),  # AUTOTUNE would end each epoch later
        deterministic=True,
    )
    return prepare_ahead(images.batch(batch_size), count_cores())


def _one_by_one(examples: tf.data.Dataset, batch_size: int, change: _Change) -> tf.data.Dataset:
    """Batches of (index, example), the x of each changed, on all cores.

    Args:
        examples: (index, example); an example is x, or a tuple that begins with x, as Keras has it.
    """

    @_as_written
    def changed_x(index: tf.Tensor, *example: Any) -> Any:
        (values,) = example
        if isinstance(values, tuple):
            return (change(index, values[0]), *values[1:])
        return change(index, values)

    changed = examples.map(changed_x, count_cores(), deterministic=True)
    return prepare_ahead(changed.batch(batch_size), count_cores())


def prepare_ahead(batches: tf.data.Dataset, num_threads: int = 1) -> tf.data.Dataset:
    """The batches in their order, made ahead in threads of their own: not those of the towers."""
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = num_threads
    options.autotune.enabled = False
    # Rewriting the graph would copy the captured tensors, once an epoch.
    options.experimental_optimization.apply_default_optimizations = False
    return batches.prefetch(_PREFETCHED_BATCHES).with_options(options)


def _seeded(augment: Augment, key: int) -> _Change:
    """(index, x) -> x, by the seed of that example in one epoch."""
    return lambda index, x: augment(x, example_seed(key, index))


def _mix(seed: int, epoch: int) -> int:
    """One seed for each pair."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1)
