"""Facts on the tensors of a tower's trace: which depend on its shard, and how."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.graph.dependence import Dependence
from towers.graph.rows import Rows
from towers.step.synchronized import Sum
from towers.step.tensor_rows import is_composite


class ShardFacts(NamedTuple):
    """The facts of a tower's trace, found in its graph as they are asked for.

    dependence: which tensors depend on the shard. rows: what they are of its rows.
    weight: scalar float64, n_t / N; 0 where one row stands for an empty shard.
    """

    dependence: Dependence
    rows: Rows
    weight: tf.Tensor

    def weighted(self, value: tf.Tensor) -> tf.Tensor:
        """value * n_t / N."""
        return value * tf.cast(self.weight, value.dtype)

    def masked(self, value: tf.Tensor) -> tf.Tensor:
        """The value; zeros in place of an empty shard's."""
        return tf.where(self.weight > 0, value, tf.zeros_like(value))

    def part(self, value: tf.Tensor, what: str) -> tf.Tensor:
        """A shard's part of the batch's value, to which the towers' parts add up.

        A sum over the rows counts by its rows; a mean over them, or a constant, weighs n_t / N.
        What is neither is warned of by `rows.warn()`, and weighs that, too.

        Args:
            value: of a shard, without a batch axis.
            what: it is, for the warning.
        """
        is_sum = self.rows.check(value, what).name == "sum"
        return self.masked(value) if is_sum else self.weighted(value)

    def known_part(self, value: tf.Tensor) -> tf.Tensor | None:
        """A tower's part of a sum or a mean over the batch's rows; None for any other value.

        Args:
            value: without a batch axis.
        """
        kind = self.rows.kind(value).name
        if kind == "sum":
            return self.masked(value)
        return self.weighted(value) if kind == "mean" and value.dtype.is_floating else None

    def added_loss(self, value: tf.Tensor) -> tf.Tensor:
        """The shard's part of a loss that a layer, or a `compute_loss`, has added: scalar."""
        return self.part(value, "a loss that a layer, compute_loss or an output adds")

    def has_rows(self, value: Any) -> bool:
        """Whether an output of the model has a row for each example of the shard."""
        if value is None or is_composite(value) or value.shape.rank is None:
            return True
        if value.shape.rank == 0:
            return False
        return value.shape[0] is None or self.rows.fact(value).has_rows

    def declared(self, sum_towers: Sum) -> Sum:
        """A `sum_towers` that records that its sums are equal in all towers."""

        def meet(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            sums = sum_towers(values)
            for tensor in sums:
                self.dependence.feed(tensor, local=False, level=0)
            return sums

        return meet
