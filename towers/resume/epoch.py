"""Epoch says which examples each step of an epoch takes, for train.py's data and fit's arrays.

    step s of an epoch  ->  examples order(s * B), ..., order(s * B + B - 1)

The order follows from the seed and the number of the epoch alone, so that an epoch can begin at any
step.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.step.structures import Structure

# AutoGraph would take 0.05 s in each process to rewrite a function for tf.data.
as_written = tf.autograph.experimental.do_not_convert


class Epoch(NamedTuple):
    """Describes the rest of an epoch. The default is a whole epoch in the order of the split."""

    batch_size: int  # the number of examples in a global batch, B
    seed: int | None = None  # the run's seed, which shuffles the examples; None does not shuffle
    number: int = 0  # the number of the epoch, from 0
    start_step: int = 0  # the number of steps that are done
    # `TowerStep.own_rows`, for a source that `reads_rows`.
    rows: Callable[..., tf.Tensor] | None = None
    # (index, x) -> x for each example.
    change: Callable[[tf.Tensor, Structure], Structure] | None = None

    @property
    def key(self) -> int:
        """Returns the seed of the epoch's random numbers. Each pair (seed, number) has its own."""
        state = np.random.SeedSequence([self.seed or 0, self.number]).generate_state(1, np.uint64)
        return int(state[0] >> 1)

    def order(self, places: tf.Tensor, count: int) -> tf.Tensor:
        """Returns the indices, below `count`, of the examples or files at these places."""
        if self.seed is None:
            return places
        key = [tf.convert_to_tensor(number, tf.int64) for number in (self.seed, self.number)]
        last = tf.convert_to_tensor(count - 1, tf.int64)
        return tf.random.experimental.index_shuffle(places, tf.stack(key), last)

    def indices(
        self, num_examples: int, use: Callable[[tf.Tensor], Structure] = lambda index: index
    ) -> tf.data.Dataset:
        """Returns use(int64 [B]) for each batch: order(start_step * B), ..., order(N - 1).

        If this worker does not need an example, ~index, which is negative, stands for it.
        """
        size = self.batch_size

        @as_written
        def indices_of(step: tf.Tensor) -> Structure:
            begin = step * size
            end = tf.minimum(begin + size, num_examples)
            index = self.order(tf.range(begin, end), num_examples)
            if self.rows is not None:
                index = tf.where(self.rows(tf.size(index)), index, ~index)
            return use(index)

        return tf.data.Dataset.range(self.start_step, num_steps(num_examples, size)).map(indices_of)

    def digest(self, num_examples: int) -> str:
        """Returns the SHA-256 of the epoch's indices. A million of them take about 0.1 seconds."""
        whole = Epoch(num_examples, seed=self.seed, number=self.number)
        return sha256(index.numpy() for index in whole.indices(num_examples))


def num_steps(num_examples: int, batch_size: int) -> int:
    """Returns the number of global batches of an epoch, including an uneven last batch."""
    return -(-num_examples // batch_size)


def content_of(parts: Structure) -> Iterator[bytes | memoryview]:
    """Yields the dtype, shape and bytes of each tensor of a structure. None parts are skipped."""
    for part in tf.nest.flatten(parts, expand_composites=True):
        if part is not None:
            values = part.numpy().reshape(-1)
            yield f"{part.dtype.name} {part.shape}".encode()
            yield b"\0".join(values) if part.dtype == tf.string else values.view(np.uint8).data


def sha256(parts: Iterable[bytes | memoryview]) -> str:
    """Returns the SHA-256 of the joined parts, in hex. 2 GB take about a second."""
    result = hashlib.sha256()
    for part in parts:
        result.update(part)
    return result.hexdigest()
