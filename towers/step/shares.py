"""What each tower's losses count in the global batch, known before the towers run.

    shard t  ->  w_t of each output  ->  w_t / sum(w)      times tower t's loss: they add up to the
                                                           global batch's loss
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from towers.step.losses import OutputLoss, is_sum
from towers.step.sharding import Shard


class Shares(NamedTuple):
    """A tower's share of the global batch.

    outputs: [O] float64, w_t / sum(w) for the loss of each of O outputs.
    examples: scalar float64, n_t / N, for the batch means that layers add. Weight
        regularization, which every tower adds in full, enters once, because these sum to 1.
    """

    outputs: tf.Tensor
    examples: tf.Tensor


SHARES_SPEC = Shares(tf.TensorSpec([None], tf.float64), tf.TensorSpec([], tf.float64))


def tower_shares(
    losses: Sequence[OutputLoss | None],
    weights: Sequence[tf.Tensor],
    shards: Sequence[Shard],
    by_weights: Sequence[bool],
) -> list[Shares]:
    """The shares of each tower.

    Args:
        losses: of the O outputs; a plain sum counts w_t itself. Where all weights of an output are
            zero, so are its shares, as Keras' own division gives.
        weights: w_t of T shards, each [O] float64.
        shards: the towers' shards.
        by_weights: which outputs' towers have sums over their sample weights: these count
            1 / sum(w), as weights of both signs may add up to 0 in a shard, but not in all.
    """
    stacked = tf.stack(list(weights))
    sums = [loss is not None and is_sum(loss.loss) for loss in losses]
    is_real = tf.stack([[tf.cast(shard.size > 0, tf.float64)] for shard in shards])
    divided = tf.math.divide_no_nan(
        tf.where(list(by_weights), is_real, stacked), tf.reduce_sum(stacked, axis=0)
    )
    outputs = tf.unstack(tf.where(sums, stacked, divided), num=len(weights))
    return [Shares(each, shard.share) for each, shard in zip(outputs, shards, strict=True)]
