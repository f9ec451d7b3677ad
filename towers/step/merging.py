"""What becomes of the state that each tower assigns in its forward pass.

| assigned                                       | after the step                  |
| ---------------------------------------------- | ------------------------------- |
| what depends on no shard, such as `steps + 1`  | tower 0's: all have the same    |
| a mean over rows, or with aggregation="mean"   | the towers' weighted mean       |
| old + a sum over rows, or aggregation="sum"    | old + the towers' sums          |
| BatchNormalization's statistics                | weighted mean, or tower 0's     |
| random seeds, aggregation="only_first_replica" | tower 0's                       |
| anything else                                  | tower 0's, with a warning       |
"""

import warnings
from collections.abc import Collection, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.rows.rows import Rows

Values = list[tf.Tensor | None]


class Merge(NamedTuple):
    """A tower's part in the new values of variables, one for each, or None.

    first: tower 0's stays. means: the towers' add up to the value. sums: to what is added to it.
    """

    first: Values
    means: Values
    sums: Values


def merge(
    variables: Sequence[keras.Variable],
    before: Sequence[tf.Tensor],
    after: Sequence[tf.Tensor | None],
    rows: Rows,
    share: tf.Tensor,
    *,
    averaged: Collection[int],
    kept: Collection[int],
) -> Merge:
    """Divides what a tower has assigned.

    Args:
        variables: the state.
        before, after: their values; None where nothing was assigned.
        rows: what the trace's tensors are to the shard's rows.
        share: scalar float64, n_t / N; 0 for an empty shard.
        averaged, kept: ids of variables whose values are averaged, or tower 0's, whatever they are.
    """
    found = Merge([], [], [])
    for variable, old, new in zip(variables, before, after, strict=True):
        first = mean = added = None
        if new is not None:
            way = "mean" if id(variable) in averaged else "first" if id(variable) in kept else (
                _way(variable, old, new, rows)
            )
            if way == "mean":
                mean = new * tf.cast(share, new.dtype)
            elif way == "sum":
                added = _added(old, new)
                added = tf.where(share > 0, added, tf.zeros_like(added))
            else:
                first = new
        for values, value in zip(found, (first, mean, added), strict=True):
            values.append(value)
    return found


def _way(variable: keras.Variable, old: tf.Tensor, new: tf.Tensor, rows: Rows) -> str:
    """ "first", "mean" or "sum"."""
    if not depends_on_shard(new, rows) or variable.aggregation == "only_first_replica":
        return "first"
    is_floating = new.dtype.is_floating
    if variable.aggregation == "sum" or rows.kind(_added(old, new)).name == "sum":
        return "sum"
    if is_floating and (variable.aggregation == "mean" or rows.kind(new).name == "mean"):
        return "mean"
    warn_of_first(variable)
    return "first"


def depends_on_shard(value: tf.Tensor, rows: Rows) -> bool:
    """Whether towers have different values: by their rows, or by their number."""
    fact = rows.fact(value)
    return fact.local or fact.has_rows or fact.degree != 0


def warn_of_first(variable: keras.Variable) -> None:
    """Warns of a variable that takes tower 0's value, though towers have different ones."""
    warnings.warn(
        f"variable {variable.path!r} is assigned what a layer computes of its rows, and each tower "
        "knows those of its shard alone: it takes tower 0's value. Make it with "
        'add_weight(..., aggregation="mean") or "sum"; or compute it of towers.gather(rows), with '
        "towers.make_parallel(model, gpus).",
        stacklevel=2,
    )


def _added(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    """x of old + x as it is: a difference would be rounded."""
    inputs = list(new.op.inputs) if new.op.type == "AddV2" else []
    others = [value for value in inputs if value is not old]
    return others[0] if len(inputs) == 2 and len(others) == 1 else new - old
