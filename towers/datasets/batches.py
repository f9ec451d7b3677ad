"""Examples -> global batches, in an order that depends on the seed and the epoch alone.

    step s of epoch e  ->  examples shuffle(e, s * B), ..., shuffle(e, s * B + B - 1)

`tf.random.experimental.index_shuffle` gives the i-th index of a permutation without the ones
before it, so that an epoch can begin at any step at once. The batches stay in the CPU's memory:
a step cuts them into shards there and copies one shard to each device. Image files are decoded in
that same order while training runs, on all cores.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers.datasets.dataset import Split
from towers.datasets.image_files import ImageFiles, check_decodable, decode
from towers.machine.devices import count_cores

_PREFETCHED_BATCHES = 2  # the next one is ready when a step ends; more only take memory


class Examples(NamedTuple):
    """One split, in memory unless it is streamed.

    source: (x [N, ...], y [N]), or structures of such tensors, on the CPU, or a cached unbatched
        tf.data.Dataset, or image files, which are streamed: decoded when their turn comes.
    num_examples: N.
    """

    source: "tuple[Any, ...] | tf.data.Dataset | ImageFiles"
    num_examples: int

    @property
    def is_streamed(self) -> bool:
        return isinstance(self.source, ImageFiles)


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


def load_examples(split: Split, num_examples: int) -> Examples:
    """Takes a split into memory, once for the whole run; but image files stay where they are.

    Args:
        split: arrays ([N, ...], [N]); or an unbatched tf.data.Dataset, which the first epoch
            caches; or image files.
        num_examples: N.
    """
    if isinstance(split, ImageFiles):
        return Examples(split, num_examples)
    if isinstance(split, tf.data.Dataset):
        return Examples(split.cache(), num_examples)
    with tf.device("/cpu:0"):
        return Examples(tf.nest.map_structure(tf.convert_to_tensor, split), num_examples)


def num_steps(num_examples: int, batch_size: int) -> int:
    """The global batches of an epoch; the last may be partial."""
    return -(-num_examples // batch_size)


def digest(examples: Examples) -> str:
    """SHA-256 of a split: a second for 2 GB.

    Of a tf.data.Dataset only its shapes and its size. Of image files their names below their
    directory, their sizes in bytes and their labels, in order: the directory may be moved.

    Raises:
        ValueError: the size of an image file cannot be read.
    """
    source = examples.source
    result = hashlib.sha256(str(examples.num_examples).encode())
    if isinstance(source, tf.data.Dataset):
        result.update(str(source.element_spec).encode())
        return result.hexdigest()
    if isinstance(source, ImageFiles):
        for name, size, label in zip(source.names, source.sizes(), source.labels, strict=True):
            result.update(os.fsencode(f"{name}\0{size} {label}\0"))
        return result.hexdigest()
    for part in tf.nest.flatten(source):
        result.update(f"{part.dtype.name} {part.shape}".encode())
        result.update(part.numpy().reshape(-1).view(np.uint8).data)
    return result.hexdigest()


def shuffled_batches(
    examples: Examples, batch_size: int, seed: int, epoch: int, start_step: int = 0
) -> tf.data.Dataset | DecodedBatches:
    """The global batches of one epoch, in its own order.

    Args:
        examples: of the split.
        batch_size: B, the global batch.
        seed: of the run.
        epoch: from 0.
        start_step: the steps of this epoch that are already done.

    Returns:
        (x [B, ...], y [B]) for each step left; the last one may be shorter.
    """
    if isinstance(examples.source, tf.data.Dataset):
        shuffled = examples.source.shuffle(
            examples.num_examples, seed=_mix(seed, epoch), reshuffle_each_iteration=False
        )
        return _finish(shuffled.skip(start_step * batch_size).batch(batch_size))

    last = examples.num_examples - 1

    def order(positions: tf.Tensor) -> tf.Tensor:
        return tf.random.experimental.index_shuffle(
            positions, tf.constant([seed, epoch], tf.int64), tf.constant(last, tf.int64)
        )

    return _indexed(examples, batch_size, start_step, order)


def ordered_batches(examples: Examples, batch_size: int) -> tf.data.Dataset | DecodedBatches:
    """The global batches of a split in its own order: (x [B, ...], y [B]), the last shorter."""
    if isinstance(examples.source, tf.data.Dataset):
        return _finish(examples.source.batch(batch_size))
    return _indexed(examples, batch_size, 0, lambda positions: positions)


def _indexed(
    examples: Examples,
    batch_size: int,
    start_step: int,
    order: Callable[[tf.Tensor], tf.Tensor],
) -> tf.data.Dataset | DecodedBatches:
    """Batches of the examples order(start_step * B), ..., order(N - 1)."""
    count = examples.num_examples

    def indices_of(step: tf.Tensor) -> tf.Tensor:
        begin = step * batch_size
        return order(tf.range(begin, tf.minimum(begin + batch_size, count)))

    indices = tf.data.Dataset.range(start_step, num_steps(count, batch_size)).map(indices_of)
    if isinstance(examples.source, ImageFiles):
        return DecodedBatches(
            examples.source, indices, _decoded(examples.source, indices, batch_size)
        )
    # The function captures the tensors; as constants they would be limited to protobuf's 2 GB.
    parts = examples.source
    return _finish(
        indices.map(lambda batch: tf.nest.map_structure(lambda p: tf.gather(p, batch), parts))
    )


def _decoded(files: ImageFiles, indices: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    """The batches of image files, decoded on all cores, one image by each."""
    with tf.device("/cpu:0"):
        paths, labels = tf.constant(files.paths), tf.constant(files.labels)
    images = indices.unbatch().map(
        lambda index: (decode(paths[index], files.shape), labels[index]),
        count_cores(),  # AUTOTUNE would end each epoch later
        deterministic=True,
    )
    return _finish(images.batch(batch_size), count_cores())


def _finish(dataset: tf.data.Dataset, num_threads: int = 1) -> tf.data.Dataset:
    """Prepares batches ahead in threads of its own, not in those that compute the towers."""
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = num_threads
    options.autotune.enabled = False
    # Rewriting the graph would copy the captured tensors, once an epoch.
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.prefetch(_PREFETCHED_BATCHES).with_options(options)


def _mix(seed: int, epoch: int) -> int:
    """One seed for each pair."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1)
