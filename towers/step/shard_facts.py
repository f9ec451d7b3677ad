"""Finds out which tensors of a traced tower depend on its shard, and how."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.graph.dependence import Dependence
from towers.graph.rows import Rows
from towers.step.synchronized import Sum
from towers.step.tensor_rows import is_composite


class ShardFacts(NamedTuple):
    """Looks up facts about the tensors of a traced tower in its graph.

    dependence: which tensors depend on the shard. rows: which are means or sums over its rows.
    weight: scalar float64, n_t / N; 0 for an empty shard.
    """

    dependence: Dependence
    rows: Rows
    weight: tf.Tensor

    def weighted(self, value: tf.Tensor) -> tf.Tensor:
        """Returns value * n_t / N."""
        return value * tf.cast(self.weight, value.dtype)

    def masked(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value; zeros for an empty shard."""
        return tf.where(self.weight > 0, value, tf.zeros_like(value))

    def part(self, value: tf.Tensor, what: str) -> tf.Tensor:
        """Returns a shard's part of a value; the towers' parts add up to the global batch's value.

        A sum over the rows is its own part. Any other value is weighted by n_t / N; `rows.warn()`
        warns if it is neither a sum nor a mean over the rows nor a constant.

        Args:
            value: the shard's value, without a batch axis.
            what: describes the value in the warning.
        """
        is_sum = self.rows.check(value, what).name == "sum"
        return self.masked(value) if is_sum else self.weighted(value)

    def known_part(self, value: tf.Tensor) -> tf.Tensor | None:
        """Returns a tower's part of a sum or a mean over the rows; None for any other value.

        Args:
            value: the tower's value, without a batch axis.
        """
        kind = self.rows.kind(value).name
        if kind == "sum":
            return self.masked(value)
        return self.weighted(value) if kind == "mean" and value.dtype.is_floating else None

    def added_loss(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the shard's part of a loss that a layer, or a `compute_loss`, adds: scalar."""
        return self.part(value, "a loss that a layer, compute_loss or an output adds")

    def has_rows(self, value: Any) -> bool:
        """Whether an output of the model has a row for each example of the shard."""
        if value is None or is_composite(value) or value.shape.rank is None:
            return True
        if value.shape.rank == 0:
            return False
        return value.shape[0] is None or self.rows.fact(value).has_rows

    def declared(self, sum_towers: Sum) -> Sum:
        """Wraps `sum_towers` to record that its sums are equal in all towers."""

        def meet(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            sums = sum_towers(values)
            for tensor in sums:
                self.dependence.feed(tensor, local=False, level=0)
            return sums

        return meet
