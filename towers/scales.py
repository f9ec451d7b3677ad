"""The towers' weights in the global batch, known before the towers run.

    shard t  ->  w_t of each output  ->  w_t / sum(w)      times tower t's loss: they add up to the
                                                           global batch's loss
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from towers.losses import OutputLoss, loss_scales
from towers.sharding import Shard, shard_shares

if TYPE_CHECKING:
    from towers.tower import Tower


class Scales(NamedTuple):
    """The factors that turn a tower's losses into its part of the global batch's loss.

    losses: [outputs] float64, w_i / sum(w_i) for each output's loss.
    added: scalar float64, n_i / N, for the losses that layers add: batch means. Weight
        regularization, which every tower adds in full, enters once, because these sum to 1.
    loss_scale: scalar, the factor `LossScaleOptimizer` wants in front of the gradients, else 1.
    """

    losses: tf.Tensor
    added: tf.Tensor
    loss_scale: tf.Tensor


SCALES_SPEC = Scales(
    tf.TensorSpec([None], tf.float64), tf.TensorSpec([], tf.float64), tf.TensorSpec([], tf.float32)
)


def tower_scales(
    losses: Sequence[OutputLoss | None],
    weights: Sequence[tf.Tensor],
    shards: Sequence[Shard],
    loss_scale: Any,
) -> list[Scales]:
    """The factors of each tower.

    Args:
        losses: the O outputs' losses.
        weights: [O] float64 for each of T towers: see `shard_weights`.
        shards: the towers' shards.
        loss_scale: scalar, see `Scales`.
    """
    return [
        Scales(scale, share, tf.cast(loss_scale, tf.float32))
        for scale, share in zip(loss_scales(losses, weights), shard_shares(shards), strict=True)
    ]


def shard_weights(
    tower: "Tower",
    output: Any,
    inputs: Sequence[tuple],
    shards: Sequence[Shard],
    devices: Sequence[str],
) -> list[tf.Tensor]:
    """w_t of each shard: [O] float64 for O outputs.

    Args:
        tower: knows the losses.
        output: a traced TowerOutput, whose dtypes and shapes tell whether masks take part.
        inputs: (parameters, state, x, y, sample_weight) of each of T towers.
        shards: the towers' shards.
        devices: of the towers, where masks are computed.
    """
    if not tower.has_masks(inputs[0][3], output):
        return [tower.weights(shard.values[2], shard.size) for shard in shards]
    function = tower.trace("masked_weights", *inputs[0], shards[0].size)
    weights = []
    for device, arguments, shard in zip(devices, inputs, shards, strict=True):
        with tf.device(device):
            weights.append(function(*arguments, shard.size))
    return weights
