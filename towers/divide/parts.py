"""Finds what each tower adds to a whole value of the trace, such as a gradient or the loss.

    gradient of a kernel  =  part of tower 0 + ... + part of tower T-1     summed over rows
                          +  gradient of a regularizer                     of parameters alone

The second kind is divided by the towers' shares of the rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from towers.divide.facts import PART, SIZE, Op, Tensors, Value, rows
from towers.divide.products import FACTORS

_JOINED = ("Add", "AddN", "AddV2", "Pack", "Sub")  # linear in all inputs together
_LINEAR = (  # linear in their first input
    "Cast", "ExpandDims", "Identity", "Mean", "Neg", "Reshape", "Squeeze", "StopGradient", "Sum",
    "Transpose", *FACTORS,
)  # fmt: skip


# A gradient of `plain_gradients`.
Gradient: TypeAlias = tf.Tensor | tuple[tf.Tensor, tf.Tensor] | None


class Parts(NamedTuple):
    """Holds what each of T towers adds to a value: terms of a sum, or rows along axis 0."""

    are_rows: bool
    values: Tensors


def parts_of(
    value: Value, real_parts: Callable[[Value], Tensors], whole: Callable[[Value], tf.Tensor],
    copy: Callable[[Op, Sequence[tf.Tensor]], Tensors], shares: Sequence[tf.Tensor],
) -> Parts | None:  # fmt: skip
    """Returns the towers' parts of a value; None if it was computed once from rows of all towers.

    An integer that follows from no row is the same in each tower.

    real_parts: gives T towers' parts of a value. whole: gives a whole value. copy: emits an
    operation on inputs. shares: T float64.
    """

    def same(value: Value) -> Tensors:
        return [whole(value)] * len(shares)

    def terms(value: Value) -> Tensors | None:
        """Returns what each tower adds to a value, or None."""
        op = value.op
        if value.fact == PART:
            return real_parts(value)
        if not _follows_from_rows(value):  # such as a regularizer's gradient
            pairs = zip(same(value), shares, strict=True)
            return [each * tf.cast(share, each.dtype) for each, share in pairs]
        # Only linear operations make parts of parts.
        if op.type in _JOINED:
            inputs = [terms(each) for each in op.inputs]
        elif op.type in _LINEAR and _follows_from_rows(op.inputs[0]):
            inputs = [terms(op.inputs[0]), *map(same, op.inputs[1:])]
        elif op.type == "Mul":
            inputs = [same(op.inputs[0]), terms(op.inputs[1])]
        else:
            return None
        known = [each for each in inputs if each is not None]
        if len(known) < len(inputs):
            return None
        return [copy(op, each)[0] for each in zip(*known, strict=True)]

    if value.fact == rows(0):
        return Parts(True, real_parts(value))
    if value.dtype.is_floating:
        found = terms(value)
        if found is None:
            return None
        return Parts(False, found)
    if _follows_from_rows(value):
        return None
    return Parts(False, same(value))


def leaves(value: Value) -> list[Value]:
    """Returns the values of the trace that `parts_of` reads."""
    values: list[Value] = []

    def record(value: Value) -> Tensors:
        values.append(value)
        return []

    parts_of(value, record, record, lambda op, inputs: [], [])  # of no tower
    return values


def _follows_from_rows(value: Value) -> bool:
    """Returns whether a value is computed from rows of the batch, and not from sizes alone."""
    stack, seen = [value], set()
    while stack:
        last = stack.pop()
        if last.fact == PART or last.fact.has_rows:
            return True
        if last not in seen and last.fact != SIZE:
            seen.add(last)
            stack += last.op.inputs
    return False


def tower_gradients(gradient: Gradient, parts: Any) -> Tensors | None:
    """Returns T towers' parts of a gradient of `plain_gradients`, or None if there are none."""
    if not isinstance(gradient, tuple):
        if parts is None or parts.are_rows:
            return None
        return parts.values
    values, indices = parts
    if values is None or indices is None or values.are_rows != indices.are_rows:
        return None
    return [tf.IndexedSlices(*pair) for pair in zip(values.values, indices.values, strict=True)]


def plain_gradients(gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[Gradient]:
    """Returns gradients in which slices are tuples (values, indices)."""
    return [(g.values, g.indices) if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def as_slices(gradients: Sequence[Gradient]) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Returns gradients of `plain_gradients` in which tuples are tf.IndexedSlices again."""
    return [tf.IndexedSlices(*g) if isinstance(g, tuple) else g for g in gradients]
