"""The losses of a model, laid beside its outputs as soon as these are known."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.step import losses as losses_lib
from towers.step.losses import ModelLoss, OutputLoss
from towers.step.sharding import Structure
from towers.step.shares import Shares
from towers.step.trials import check_is_mean


class OutputLosses:
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
            names: of the model's outputs, if it has any.
        """
        self.model_loss = loss if isinstance(loss, ModelLoss) else None
        self.outputs: Structure = None
        self.each: list[OutputLoss | None] = []
        self._arguments = (loss, loss_weights)
        self._names = names

    def bind(self, outputs: Structure) -> None:
        """Takes the outputs; a subclassed model's are not known before its first trace."""
        if self.outputs is None:
            self.outputs = tf.nest.map_structure(lambda v: v.dtype, outputs)
            self.each = losses_lib.resolve_losses(*self._arguments, self.outputs, self._names)

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
                by_weights = losses_lib.divides_by_weights(output.loss, weights[i])
                loss = losses_lib.summed(output.loss) if by_weights else output.loss
                value = loss(labels[i], predictions[i], weights[i])
                terms.append(value * tf.cast(shares.outputs[i] * output.factor, value.dtype))
        terms += added
        if not terms:
            raise ValueError("there is no loss: give a loss, or a layer that adds one.")
        return tf.add_n([tf.cast(term, terms[0].dtype) for term in terms])

    def check_means(self, y: Structure, predictions: Sequence[tf.Tensor]) -> None:
        """Tries whether each loss is the sum of its parts; arguments as for `have_masks`.

        Raises:
            NoMeanOverRows: one is not, see `trials.check_is_mean`.
        """
        labels = self.beside_outputs(y, "y")
        for output, label, y_pred in zip(self.each, labels, predictions, strict=True):
            if output is not None and label is not None:
                check_is_mean(output.loss, label, y_pred)

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
            losses_lib.shard_weight(output.loss, weight, size, mask)
            if output else tf.zeros([], tf.float64)
            for output, weight, mask in zip(
                self.each, weights, masks or [None] * len(self.each), strict=True
            )
        ])

    def divided_by_weights(self, sample_weight: Structure) -> list[bool]:
        """Of which outputs `total` takes a sum, for it counts 1 / sum(w): see `tower_shares`."""
        weights = self.beside_outputs(sample_weight, "sample_weight", repeat=True)
        return [
            output is not None and losses_lib.divides_by_weights(output.loss, weight)
            for output, weight in zip(self.each, weights, strict=True)
        ]

    def masks(self, y: Structure, predictions: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """What Keras masks in each output's loss on a shard; None where nothing is."""
        return [
            losses_lib.loss_mask(output.loss, label, y_pred) if output else None
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
            predictions, masks: a traced tower's; only dtypes, shapes and which masks there are.
        """
        for output, label, y_pred, mask in zip(
            self.each, self.beside_outputs(y, "y"), predictions, masks, strict=True
        ):
            if output is not None and label is not None:
                if mask is not None or losses_lib.makes_mask(output.loss, label, y_pred):
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
        return losses_lib.per_output(value, self.outputs, self._names, what, repeat=repeat)

    def _beside_losses(self, y: Structure) -> Structure:
        """Labels for the outputs with a loss alone, as Keras takes them too, are laid beside it."""
        labels = tf.nest.flatten(y)
        if len(labels) != len(self.each) - self.each.count(None):
            return y
        remaining = iter(labels)
        return [None if output is None else next(remaining) for output in self.each]
