"""Losses of a model's outputs, and the weight that a shard's loss has in the global batch's.

Keras reduces a batch's per-example losses to one number, `L_i` for shard i. The global batch's loss
is then exactly

    sum(w_i * L_i) / sum(w_i)        w_i: the denominator of Keras' reduction on shard i

so that a tower that multiplies its loss by its share, w_i / sum(w_i), before its gradient makes the
averaging of losses and gradients a plain sum.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.step.outputs import (
    ModelLoss,
    OutputLoss,
    is_sum,
    loss_mask,
    loss_reduction,
    makes_mask,
    per_output,
    resolve_losses,
)
from towers.step.sharding import Shard
from towers.step.structures import Structure


class Shares(NamedTuple):
    """A tower's share of the global batch.

    outputs: [O] float64, w_t / sum(w) for the loss of each of O outputs.
    examples: scalar float64, n_t / N, for the batch means that layers add. Weight
        regularization, which every tower adds in full, enters once, because these sum to 1.
    """

    outputs: tf.Tensor
    examples: tf.Tensor


SHARES_SPEC = Shares(tf.TensorSpec([None], tf.float64), tf.TensorSpec([], tf.float64))


class Losses:
    """One loss for each output, or the model's own `compute_loss` for all.

    Attributes known once `bind` was called:
        outputs: the structure of the model's outputs, of dtypes.
        each: the loss of each of O outputs; None for an output without one.
    """

    def __init__(self, loss: Any, loss_weights: Any, names: Sequence[str] | None) -> None:
        """
        Args:
            loss: as `keras.Model.compile` takes it, or a ModelLoss.
            loss_weights: as `compile` takes them.
            names: the names of the model's outputs, if they have names.
        """
        self.model_loss = loss if isinstance(loss, ModelLoss) else None
        self.outputs: Structure = None
        self.each: list[OutputLoss | None] = []
        self._arguments = (loss, loss_weights)
        self._names = names

    def bind(self, outputs: Structure) -> None:
        """Learns the model's outputs, which are not known before a subclassed model is traced."""
        if self.outputs is None:
            self.outputs = tf.nest.map_structure(lambda v: v.dtype, outputs)
            self.each = resolve_losses(*self._arguments, self.outputs, self._names)

    def total(
        self,
        y: Structure,
        predictions: Sequence[tf.Tensor],
        sample_weight: Structure,
        added: Sequence[tf.Tensor],
        shares: Shares,
    ) -> tf.Tensor:
        """A shard's part of the global batch's loss: the sum of share * factor * loss.

        Args:
            y, sample_weight: of the shard, structures of tensors [n, ...] or None.
            predictions: the flattened outputs.
            added: the shard's parts of losses that layers, or a `compute_loss`, have added.
            shares: what the losses of the outputs count.

        Raises:
            ValueError: there is no loss at all.
        """
        labels = self.beside_outputs(y, "y")
        weights = self.beside_outputs(sample_weight, "sample_weight", repeat=True)
        terms = []
        for i, output in enumerate(self.each):
            if output is not None:
                by_weights = divides_by_weights(output.loss, weights[i])
                loss = summed(output.loss) if by_weights else output.loss
                value = loss(labels[i], predictions[i], weights[i])
                terms.append(value * tf.cast(shares.outputs[i] * output.factor, value.dtype))
        terms += added
        if not terms:
            raise ValueError("there is no loss: give a loss, or a layer that adds one.")
        return tf.add_n([tf.cast(term, terms[0].dtype) for term in terms])

    def weigh(
        self,
        sample_weight: Structure,
        size: tf.Tensor,
        masks: Sequence[tf.Tensor | None] | None = None,
    ) -> tf.Tensor:
        """w_t of each output's loss on a shard: [O] float64, 0 for an output without a loss.

        Args:
            sample_weight: the shard's.
            size: scalar int32, its examples that count.
            masks: what `masks` returned, where masks take part.
        """
        weights = self.beside_outputs(sample_weight, "sample_weight", repeat=True)
        return tf.stack([
            shard_weight(output.loss, weight, size, mask)
            if output else tf.zeros([], tf.float64)
            for output, weight, mask in zip(
                self.each, weights, masks or [None] * len(self.each), strict=True
            )
        ])

    def divided_by_weights(self, sample_weight: Structure) -> list[bool]:
        """Whether each output's loss is divided by the sum of its sample weights."""
        weights = self.beside_outputs(sample_weight, "sample_weight", repeat=True)
        return [
            output is not None and divides_by_weights(output.loss, weight)
            for output, weight in zip(self.each, weights, strict=True)
        ]

    def masks(self, y: Structure, predictions: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """The masks of each output's loss on a shard; None where nothing is masked."""
        return [
            loss_mask(output.loss, label, y_pred) if output else None
            for output, label, y_pred in zip(
                self.each, self.beside_outputs(y, "y"), predictions, strict=True
            )
        ]

    def have_masks(
        self, y: Structure, predictions: Sequence[tf.Tensor], masks: Sequence[tf.Tensor | None]
    ) -> bool:
        """Whether a mask decides the weight of some loss.

        Args:
            y: a shard's labels.
            predictions, masks: a traced tower's; only dtypes, shapes and absent masks matter.
        """
        for output, label, y_pred, mask in zip(
            self.each, self.beside_outputs(y, "y"), predictions, masks, strict=True
        ):
            if output is not None and label is not None:
                if mask is not None or makes_mask(output.loss, label, y_pred):
                    return True
        return False

    def beside_outputs(
        self, value: Structure, what: str, repeat: bool = False
    ) -> list[tf.Tensor | None]:
        """`value` laid out beside the flattened outputs; None for all beside a ModelLoss.

        Args:
            value: labels or sample weights.
            what: the argument's name, "y" or "sample_weight".
            repeat: whether one value stands for every output.

        Raises:
            ValueError: the value does not match.
        """
        if self.model_loss:
            return [None] * len(self.each)
        if what == "y" and not isinstance(value, dict):
            value = self._beside_losses(value)
        return per_output(value, self.outputs, self._names, what, repeat=repeat)

    def _beside_losses(self, y: Structure) -> Structure:
        """Labels that are given for outputs with a loss alone, laid out with None elsewhere."""
        labels = tf.nest.flatten(y)
        if len(labels) != len(self.each) - self.each.count(None):
            return y
        remaining = iter(labels)
        return [None if output is None else next(remaining) for output in self.each]


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


# Keras' reductions.


def shard_weight(
    loss: keras.losses.Loss,
    sample_weight: tf.Tensor | None,
    size: tf.Tensor,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """w_i: the denominator of Keras' reduction of this loss on this shard.

    | reduction               | w_i                                                          |
    | ----------------------- | ------------------------------------------------------------ |
    | sum_over_batch_size     | examples; the count of valid steps where there is a mask     |
    | mean_with_sample_weight | the sum of the sample weights, over the valid steps          |
    | sum                     | 1, and the caller does not divide                            |

    Source: `reduce_weighted_values` and `apply_mask` in keras/src/losses/loss.py.

    Args:
        loss: the Keras loss.
        sample_weight: [n, ...], or None for 1 everywhere.
        size: scalar int32, the examples of the shard that count.
        mask: [n, ...] of bool, or None.

    Returns:
        A scalar float64, 0 for an empty shard.
    """
    reduction = loss_reduction(loss)
    if divides_by_weights(loss, sample_weight):
        weight = tf.cast(sample_weight, tf.float64)
        if mask is not None:
            while weight.shape.rank < mask.shape.rank:
                weight = weight[..., tf.newaxis]
            weight = weight * tf.cast(mask, tf.float64)
        weight = tf.reduce_sum(weight)
    elif reduction != "sum" and mask is not None:
        weight = tf.reduce_sum(tf.cast(mask, tf.float64))
    elif reduction == "sum":
        weight = tf.ones([], tf.float64)
    else:
        weight = tf.cast(size, tf.float64)
    return tf.where(size > 0, weight, 0.0)


def divides_by_weights(loss: keras.losses.Loss, sample_weight: Any) -> bool:
    """Whether Keras divides the loss by the sum of the sample weights."""
    return loss_reduction(loss) == "mean_with_sample_weight" and sample_weight is not None


def summed(loss: keras.losses.Loss) -> keras.losses.Loss:
    """A copy of a loss with reduction="sum"."""
    found = copy.copy(loss)
    found.reduction = "sum"
    return found
