"""Examples -> global batches, in an order that depends on the seed and the epoch alone.

    step s of epoch e  ->  examples shuffle(e, s * B), ..., shuffle(e, s * B + B - 1)

`tf.random.experimental.index_shuffle` gives the i-th index of a permutation without the ones
before it, so that an epoch can begin at any step at once. What can only be streamed is shuffled
within a buffer, in an order of the same seed and epoch; what has a state is read in its own. The
batches stay in the CPU's memory: a step cuts them into shards there and copies one shard to each
device.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from towers.app.datasets import augment as augment_lib
from towers.app.datasets.augment import batch_seed, example_seed
from towers.app.datasets.dataset import Split
from towers.app.datasets.pixels import with_bytes
from towers.app.datasets.user import source_of
from towers.resume import source as source_lib
from towers.resume.source import Batches, DataSource, Epoch, InputOptions, as_written, shuffled


class Examples(NamedTuple):
    """One split, as a run is fed with it.

    source: opened.
    augment: what changes an example in training, if anything does.
    mix: what mixes the examples of a global batch in training, if anything does.
    changes: what else is made of each batch, as functions of tf.data.
    """

    source: DataSource
    augment: augment_lib.Augment | None = None
    mix: augment_lib.Mix | None = None
    changes: Sequence[Callable[..., Any]] = ()

    @property
    def num_examples(self) -> int:
        return self.source.num_examples

    @property
    def specs(self) -> Any:
        """The specs of a batch's x, y and sample weights; None for what is absent."""
        return keras.utils.unpack_x_y_sample_weight(ordered_batches(self, 1).element_spec)


def load_examples(
    split: Split, options: InputOptions = InputOptions(), restored: Sequence[bool] = ()
) -> Examples:
    """Takes a split into memory, once for the whole run; but what is too large stays where it is.

    Args:
        split: of a `Dataset`.
        options: how examples are read, and changed in training.
        restored: `Dataset.restored` of the data set that the split belongs to.

    Raises:
        ValueError: see `augment.load` and `tf_data.Streamed.opened`.
    """
    examples = Examples(source_of(split).opened(options))
    if any(restored):
        is_tuple = isinstance(ordered_batches(examples, 1).element_spec, tuple)
        examples = examples._replace(changes=[with_bytes(restored, is_tuple)])
    if options.augment is None:
        return examples
    augment, mix = augment_lib.load(options.augment, *examples.specs)
    return examples._replace(augment=augment, mix=mix)


def digest(examples: Examples) -> str:
    """SHA-256 of a split: of its size, and of what its source knows without reading all of it.

    Raises:
        ValueError: the size of an image file cannot be read.
    """
    count = str(examples.num_examples).encode()
    return source_lib.sha256(itertools.chain([count], examples.source.identity()))


def shuffled_batches(
    examples: Examples, batch_size: int, seed: int, epoch: int, start_step: int = 0
) -> Batches:
    """The global batches of one epoch, in its own order, changed by `augment` and `mix`.

    Args:
        examples: of the split.
        batch_size: B, the global batch.
        seed: of the run.
        epoch: from 0.
        start_step: the steps of this epoch that are already done.

    Returns:
        (x [B, ...], y [B]) for each step left; the last one may be shorter.
    """
    # One seed for each pair.
    key = int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1)
    augment, mix = examples.augment, examples.mix
    batches = _batches(examples, Epoch(
        batch_size,
        start_step,
        order=lambda count: lambda indices: shuffled(indices, seed, epoch, count),
        key=key,
        change=augment and (lambda index, x: augment(x, example_seed(key, index))),
        number=epoch,
    ))
    if mix is None:
        return batches
    mixed = as_written(lambda step, batch: mix(batch, batch_seed(key, step)))
    return batches.enumerate(start_step).map(mixed)


def ordered_batches(examples: Examples, batch_size: int) -> Batches:
    """The global batches of a split in its own order: (x [B, ...], y [B]), the last shorter."""
    return _batches(examples, Epoch(batch_size))


def _batches(examples: Examples, epoch: Epoch) -> Batches:
    batches = examples.source.batches(epoch)
    for change in examples.changes:
        batches = batches.map(change)
    return batches
