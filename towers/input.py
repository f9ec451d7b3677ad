"""Examples -> global batches, in an order that depends on the seed and the epoch alone.

    step s of epoch e  ->  examples shuffle(e, s * B), ..., shuffle(e, s * B + B - 1)

`tf.random.experimental.index_shuffle` gives the i-th index of a permutation without the ones
before it, so that an epoch can begin at any step at once. The batches stay in the CPU's memory:
a step cuts them into shards there and copies one shard to each device.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

_PREFETCHED_BATCHES = 2  # the next one is ready when a step ends; more only take memory


class Examples(NamedTuple):
    """One split, in memory.

    source: (x [N, ...], y [N]) as tensors on the CPU, or a cached unbatched tf.data.Dataset.
    num_examples: N.
    """

    source: Any
    num_examples: int


def load_examples(split: Any, num_examples: int) -> Examples:
    """Takes a split into memory, once for the whole run.

    Args:
        split: arrays ([N, ...], [N]), or an unbatched tf.data.Dataset, which the first epoch
            caches.
        num_examples: N.
    """
    if isinstance(split, tf.data.Dataset):
        return Examples(split.cache(), num_examples)
    with tf.device("/cpu:0"):
        return Examples(tuple(tf.convert_to_tensor(part) for part in split), num_examples)


def num_steps(num_examples: int, batch_size: int) -> int:
    """The global batches of an epoch; the last may be partial."""
    return -(-num_examples // batch_size)


def digest(examples: Examples) -> str:
    """SHA-256 of a split: a second for 2 GB. Of a tf.data.Dataset only its shapes and its size."""
    result = hashlib.sha256(str(examples.num_examples).encode())
    if isinstance(examples.source, tf.data.Dataset):
        result.update(str(examples.source.element_spec).encode())
        return result.hexdigest()
    for part in examples.source:
        result.update(f"{part.dtype.name} {part.shape}".encode())
        result.update(part.numpy().reshape(-1).view(np.uint8).data)
    return result.hexdigest()


def shuffled_batches(
    examples: Examples, batch_size: int, seed: int, epoch: int, start_step: int = 0
) -> tf.data.Dataset:
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

    return _gathered(examples, batch_size, start_step, order)


def ordered_batches(examples: Examples, batch_size: int) -> tf.data.Dataset:
    """The global batches of a split in its own order: (x [B, ...], y [B]), the last shorter."""
    if isinstance(examples.source, tf.data.Dataset):
        return _finish(examples.source.batch(batch_size))
    return _gathered(examples, batch_size, 0, lambda positions: positions)


def _gathered(
    examples: Examples,
    batch_size: int,
    start_step: int,
    order: Callable[[tf.Tensor], tf.Tensor],
) -> tf.data.Dataset:
    # The function captures the tensors; as constants they would be limited to protobuf's 2 GB.
    parts: Sequence[tf.Tensor] = examples.source
    count = examples.num_examples

    def gather(step: tf.Tensor) -> tuple[tf.Tensor, ...]:
        begin = step * batch_size
        indices = order(tf.range(begin, tf.minimum(begin + batch_size, count)))
        return tuple(tf.gather(part, indices) for part in parts)

    steps = tf.data.Dataset.range(start_step, num_steps(count, batch_size))
    return _finish(steps.map(gather))


def _finish(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Prepares batches ahead in a thread of its own, not in those that compute the towers."""
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = 1
    options.autotune.enabled = False
    # Rewriting the graph would copy the captured tensors, once an epoch.
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.prefetch(_PREFETCHED_BATCHES).with_options(options)


def _mix(seed: int, epoch: int) -> int:
    """One seed for each pair."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1)
