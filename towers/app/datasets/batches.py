"""Makes global batches of examples, in an order that depends on the seed and the epoch alone.

    step s of epoch e  ->  examples shuffle(e, s * B), ..., shuffle(e, s * B + B - 1)

`tf.random.experimental.index_shuffle` gives the i-th index of a permutation without the ones
before it, so that an epoch can begin at any step at once. Streamed data are shuffled within a
buffer, by the same seed and epoch. The batches stay in the CPU's memory, where a step cuts them
into shards; it copies one shard to each device.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.app.config import TrainConfig
from towers.app.datasets import augment as augment_lib
from towers.app.datasets.augment import example_seed
from towers.app.datasets.dataset import Split
from towers.app.datasets.pixels import with_bytes
from towers.app.datasets.user import source_of
from towers.app.datasets.source import Batches, DataSource
from towers.resume.epoch import Epoch, sha256
from towers.step.structures import Structure


class Examples(NamedTuple):
    """Holds an opened split with the functions that change its examples and batches."""

    source: DataSource
    augment: augment_lib.Change | None = None  # (x, seed) -> x, for each example in training
    changes: Sequence[Callable[..., Structure]] = ()  # of a batch, in training and in evaluation

    @property
    def num_examples(self) -> int:
        return self.source.num_examples

    @property
    def specs(self) -> Any:
        """Returns the specs of a batch: x, y and sample_weight; None for absent parts."""
        return keras.utils.unpack_x_y_sample_weight(self.batches(Epoch(1)).element_spec)

    def batches(self, epoch: Epoch) -> Batches:
        """Returns the global batches of an epoch that are left; the last one may be shorter.

        `augment` changes x of batches such as (x [B, ...], y [B]) if the epoch is shuffled. With
        `epoch.rows`, a source that `reads_rows` neither reads nor changes other rows.
        """
        key, augment, rows = epoch.key, self.augment, epoch.rows
        if augment is not None and epoch.seed is not None:

            def augmented(index: tf.Tensor, x: Structure) -> Structure:
                changed = partial(augment, x, example_seed(key, index))
                if rows is None:
                    return changed()
                return tf.cond(index < 0, lambda: x, changed)  # another worker needs it

            epoch = epoch._replace(change=augmented)
        batches = self.source.batches(epoch)
        for change in self.changes:
            batches = batches.map(change)
        return batches


def load_examples(
    split: Split,
    config: TrainConfig = TrainConfig(),
    restored: Sequence[bool] = (),
    augment: str | None = None,
) -> Examples:
    """Opens a split of a `Dataset`; multiplies the `restored` parts of x by 255 again.

    augment: the name of the change of training examples, as in `TrainConfig`.
    """
    changes = [with_bytes(restored)] if any(restored) else []
    examples = Examples(source_of(split).opened(config), changes=changes)
    if augment is None:
        return examples
    return examples._replace(augment=augment_lib.load(augment, examples.specs[0]))


def digest(examples: Examples) -> str:
    """Returns the SHA-256 of a split's size and its source's `identity`."""
    count = str(examples.num_examples).encode()
    return sha256(itertools.chain([count], examples.source.identity()))
