"""Computes a shard's losses, and their share of the global batch's loss.

Keras reduces a batch's per-example losses to one number, `L_i` for shard i. The global batch's loss
is then exactly

    sum(w_i * L_i) / sum(w_i)        w_i: the denominator of Keras' reduction on shard i

A tower multiplies its loss by its share, w_i / sum(w_i), before its gradient. The averages of
losses and gradients are then plain sums.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine.loss_internals import LossTerm, LossTerms
from towers.step.loss_kinds import (
    ModelLoss, ShardFacts, check_loss, check_reduction, loss_mask, loss_reduction, makes_mask,
    with_reduction,
)
from towers.step.sharding import Shard
from towers.step.structures import Structure, map_tensors


class Shares(NamedTuple):
    """Holds a tower's shares of the global batch.

    Every tower adds weight regularization in full; it counts once, because `examples` sum to 1.
    """

    terms: tf.Tensor  # [K] float64, w_t / sum(w) for each of the K terms of the loss
    examples: tf.Tensor  # scalar float64, n_t / N, for batch means that layers add


SHARES_SPEC = Shares(tf.TensorSpec([None], tf.float64), tf.TensorSpec([], tf.float64))


class Losses:
    """Computes the losses of the model's outputs, or calls a custom `compute_loss` instead."""

    def __init__(
        self, loss: Any, loss_weights: Any, names: Sequence[str] | None, *, is_alone: bool = False
    ) -> None:
        """Args: loss, loss_weights: as for `compile`, or a ModelLoss. names: the outputs' names."""
        self.model_loss = loss if isinstance(loss, ModelLoss) else None
        self.outputs: Structure = None  # the outputs' structure, with dtypes as leaves, by `bind`
        has_terms = loss is not None and self.model_loss is None
        self._terms = LossTerms(loss, loss_weights, names) if has_terms else None
        self._names, self._is_alone = names, is_alone  # for one tower, any loss is exact

    def bind(self, outputs: Structure) -> None:
        """Stores the outputs' structure and dtypes, known once a subclassed model is traced."""
        if self.outputs is None:
            self.outputs = map_tensors(lambda v: v.dtype, outputs)

    def terms(
        self, y: Structure, sample_weight: Structure, predictions: Sequence[Any] | None = None
    ) -> list[LossTerm]:
        """Returns the K terms of the loss; `predictions`: the flattened outputs, if needed."""
        if self._terms is None:
            return []
        if y is None:
            raise ValueError("y is None, and the loss needs labels: pass x and y, or *batch.")
        y_pred = self.outputs
        if predictions is not None:
            y_pred = tf.nest.pack_sequence_as(self.outputs, list(predictions))
        try:
            terms = self._terms.terms(y, y_pred, sample_weight)
        except TypeError as error:  # Keras looks up a name among outputs that have none
            outputs = self._names or self.outputs
            text = "loss, loss_weights or y does not match the model's outputs; give one for each: "
            raise ValueError(f"{text}{outputs}.") from error
        for term in terms:
            check_reduction(term.loss)
        return terms

    def total(
        self, y: Structure, predictions: Sequence[tf.Tensor], sample_weight: Structure,
        added: Sequence[tf.Tensor], shares: Shares, facts: ShardFacts,
    ) -> tf.Tensor:
        """Returns a shard's part of the global batch's loss: the sum of share * factor * loss.

        The loss of an output without a batch axis is treated like a loss that a layer adds.

        added: the shard's losses that layers, or a `compute_loss`, have added.
        """
        values, what = [], "a loss that a layer, compute_loss or an output adds"
        for i, term in enumerate(self.terms(y, sample_weight, predictions)):
            has_rows = all(map(facts.has_rows, tf.nest.flatten(term.y_pred)))
            if has_rows and not self._is_alone:
                check_loss(term.loss, term.y, term.y_pred, term.sample_weight)
            loss = term.loss
            if divides_by_weights(loss, term.sample_weight):
                loss = with_reduction(loss, "sum")
            value = loss(term.y, term.y_pred, term.sample_weight)
            if has_rows:
                values.append(value * tf.cast(shares.terms[i] * term.factor, value.dtype))
            else:
                values.append(facts.part(value * tf.cast(term.factor, value.dtype), what))
        values += [facts.part(value, what) for value in added]
        if not values:
            raise ValueError("there is no loss: give a loss, or a layer that adds one.")
        return tf.add_n([tf.cast(value, values[0].dtype) for value in values])

    def weigh(
        self, y: Structure, sample_weight: Structure, size: tf.Tensor,
        predictions: Sequence[tf.Tensor] | None = None,
    ) -> tf.Tensor:
        """Returns w_t of each term on a shard, [K]; `predictions` bring masks."""
        weights = []
        for term in self.terms(y, sample_weight, predictions):
            mask = None if predictions is None else loss_mask(term.loss, term.y, term.y_pred)
            weights.append(shard_weight(term.loss, term.sample_weight, size, mask))
        return tf.stack(weights) if weights else tf.zeros([0], tf.float64)

    def have_masks(
        self, y: Structure, predictions: Sequence[tf.Tensor], masks: Sequence[tf.Tensor | None]
    ) -> bool:
        """Whether a mask, of a traced tower's flattened outputs or a loss's, decides a weight."""
        with_masks = self.terms(y, None, masks)
        return any(
            masked.y_pred is not None and not tf.nest.is_nested(masked.y_pred)
            or makes_mask(term.loss, term.y, term.y_pred)
            for term, masked in zip(self.terms(y, None, predictions), with_masks, strict=True)
        )


def tower_shares(
    terms: Sequence[LossTerm], weights: Sequence[tf.Tensor], shards: Sequence[Shard]
) -> list[Shares]:
    """Returns the shares of T towers, given w_t of their shards, each [K] float64.

    With reduction="sum" a share is w_t itself. If Keras divides by sample weights, a share is
    1 / sum(w): weights of both signs may sum to 0 in one shard, but not in all. If all weights of a
    term are 0, its shares are 0, the result of Keras' own division.
    """
    stacked = tf.stack(list(weights))
    sums = tf.constant([loss_reduction(term.loss) == "sum" for term in terms], tf.bool)
    by_weights = tf.constant([divides_by_weights(t.loss, t.sample_weight) for t in terms], tf.bool)
    is_real = tf.stack([[tf.cast(shard.size > 0, tf.float64)] for shard in shards])
    divided = tf.math.divide_no_nan(
        tf.where(by_weights, is_real, stacked), tf.reduce_sum(stacked, axis=0)
    )
    found = tf.unstack(tf.where(sums, stacked, divided), num=len(weights))
    return [Shares(each, shard.share) for each, shard in zip(found, shards, strict=True)]


def shard_weight(
    loss: keras.losses.Loss, sample_weight: tf.Tensor | None, size: tf.Tensor,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns w_i, the denominator of Keras' reduction of this loss on this shard: scalar float64.

    | reduction               | w_i                                                          |
    | ----------------------- | ------------------------------------------------------------ |
    | sum_over_batch_size     | the count of examples; of valid steps if there is a mask     |
    | mean_with_sample_weight | the sum of the sample weights, over the valid steps          |
    | sum                     | 1, and the caller does not divide                            |

    Source: `reduce_weighted_values` and `apply_mask` in keras/src/losses/loss.py.

    size: scalar int32, the shard's number of examples. An empty shard has size 0 and weight 0.
    """
    if loss_reduction(loss) == "sum":
        weight = tf.ones([], tf.float64)
    elif divides_by_weights(loss, sample_weight):
        weight = tf.cast(sample_weight, tf.float64)
        if mask is not None:
            while weight.shape.rank < mask.shape.rank:
                weight = weight[..., tf.newaxis]
            weight = weight * tf.cast(mask, tf.float64)
        weight = tf.reduce_sum(weight)
    elif mask is not None:
        weight = tf.reduce_sum(tf.cast(mask, tf.float64))
    else:
        weight = tf.cast(size, tf.float64)
    return tf.where(size > 0, weight, 0.0)


def divides_by_weights(loss: keras.losses.Loss, sample_weight: tf.Tensor | None) -> bool:
    """Whether Keras divides the loss by the sum of the sample weights."""
    return loss_reduction(loss) == "mean_with_sample_weight" and sample_weight is not None
