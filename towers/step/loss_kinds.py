"""Decides from a loss's graph whether the towers' losses add up to the global batch's loss.

    one value for each row     works with any reduction (`losses.shard_weight`)
    a mean over the rows       is weighted by n_t / N
    a sum over the rows        works with reduction="sum": the towers' values add up
    neither                    needs all rows: Dice, the root of a mean, a mean over a mask

The loss is traced once on symbolic rows, and `towers.graph` walks its graph; nothing is computed.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.graph.facts import CHOSEN, Fault, UNEVEN
from towers.graph.levels import Dependence
from towers.graph.rows import Rows
from towers.machine.loss_internals import function_loss, keras_mask, marked
from towers.machine.user_lines import line_of
from towers.step.checks import BatchInCode, check_no_fixed_batch
from towers.step.gathering import NeedsOtherTowers, Sum, gathered_by
from towers.step.raw_variables import read_as_they_are
from towers.step.structures import Structure, batch_specs, components, is_composite, map_tensors


class ShardFacts(NamedTuple):
    """Looks up facts about the tensors of a traced tower in its graph."""

    dependence: Dependence  # which tensors depend on the shard
    rows: Rows  # which tensors are means or sums over the shard's rows
    weight: tf.Tensor  # scalar float64, n_t / N; 0 for an empty shard

    def weighted(self, value: tf.Tensor) -> tf.Tensor:
        """Returns value * n_t / N."""
        return value * tf.cast(self.weight, value.dtype)

    def masked(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value; zeros for an empty shard."""
        return tf.where(self.weight > 0, value, tf.zeros_like(value))

    def part(self, value: tf.Tensor, what: str) -> tf.Tensor:
        """Returns a shard's part of a value without a batch axis, for a sum over the towers.

        A sum over the rows is its own part. Any other value is weighted by n_t / N, with a warning
        that names `what` it is, unless it is a mean over the rows or a constant.
        """
        is_sum = self.rows.check(value, what).name == "sum"
        return self.masked(value) if is_sum else self.weighted(value)

    def known_part(self, value: tf.Tensor) -> tf.Tensor | None:
        """Returns a tower's part of a sum or a mean over the rows; None for any other value."""
        kind = self.rows.kind(value).name
        if kind == "sum":
            return self.masked(value)
        return self.weighted(value) if kind == "mean" and value.dtype.is_floating else None

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


_REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")


def check_reduction(loss: keras.losses.Loss) -> None:
    """Raises NeedsOtherTowers if a loss has no reduction, so it is not one number."""
    if loss_reduction(loss) not in _REDUCTIONS:
        raise NeedsOtherTowers(
            f"loss {loss.name!r} has reduction={loss.reduction!r}, but a loss must be one number. "
            f"Use one of {', '.join(_REDUCTIONS)}; or fit with towers.make_parallel(model, gpus)."
        )


def overrides_call(loss: keras.losses.Loss) -> bool:
    """Whether a loss replaces `Loss.__call__` and with it Keras' reduction."""
    return type(loss).__call__ is not keras.losses.Loss.__call__


def loss_reduction(loss: keras.losses.Loss) -> str:
    """Returns a loss's reduction; "mean" if a custom `__call__` replaces Keras' reduction."""
    return "mean" if overrides_call(loss) else loss.reduction


def with_reduction(loss: keras.losses.Loss, reduction: str) -> keras.losses.Loss:
    """Returns a shallow copy of a loss with another reduction; `copy.copy` would serialize it."""
    copied = object.__new__(type(loss))
    vars(copied).update(vars(loss), reduction=reduction)
    return copied


def loss_mask(loss: keras.losses.Loss, y: Structure, y_pred: Structure) -> tf.Tensor | None:
    """Returns the mask that Keras applies: the output's & the loss's own, as for `ignore_class`."""
    mask = keras_mask(y_pred)
    if not makes_mask(loss, y, y_pred):
        return mask
    own = _own_mask(loss, y, y_pred)
    return own if mask is None else mask & own


def makes_mask(loss: keras.losses.Loss, y: Structure, y_pred: Structure) -> bool:
    """Whether a loss makes a mask for such labels and predictions, as `ignore_class` does."""
    if overrides_call(loss):
        return False
    # A scratch graph: in the caller's, the loss's assertions would keep all that they read alive.
    specs = map_tensors(
        lambda v: v if isinstance(v, tf.TypeSpec) else tf.type_spec_from_value(v), [y, y_pred]
    )
    masked = tf.function(functools.partial(_own_mask, loss), autograph=False)
    return masked.get_concrete_function(*specs).structured_outputs is not None


def _own_mask(loss: keras.losses.Loss, y: Any, y_pred: Any) -> tf.Tensor | None:
    y, y_pred = map_tensors(lambda v: tf.cast(v, loss.dtype), [y, y_pred])
    ignored = getattr(loss, "ignore_class", None)
    if (type(loss) is not keras.losses.SparseCategoricalCrossentropy or ignored is None
            or y.shape.rank == y_pred.shape.rank):
        return keras_mask(loss.call(y, y_pred))
    # Keras takes the mask's shape from the predictions, which would take a whole forward pass.
    return y != tf.cast(ignored, loss.dtype)


class ModelLoss(functools.partial[tf.Tensor]):
    """Is a custom `compute_loss`: (x, y, y_pred, sample_weight, training) -> a batch's mean."""


@contextmanager
def trackers_kept_out(model: keras.Model, scope: keras.StatelessScope) -> Iterator[None]:
    """Discards the metric updates of a `compute_loss`; a later call has the rows of all towers."""
    trackers = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
    scope.state_mapping.update({id(v): zero for v, zero in trackers})
    yield
    if scope.losses and any(scope.get_current_value(v) is not zero for v, zero in trackers):
        raise NeedsOtherTowers(
            "compute_loss updates a metric, which would miss the losses that layers add. Update it "
            "in compute_metrics, or use towers.make_parallel(model, gpus)."
        )


def check_is_number(value: tf.Tensor) -> None:
    """Raises NeedsOtherTowers if `value`, which a `compute_loss` returns, is no scalar."""
    if keras.ops.ndim(value):
        raise NeedsOtherTowers(
            f"compute_loss returns values of shape {value.shape}, but a loss must be one number. "
            "Return their mean or sum; or fit with towers.make_parallel(model, gpus)."
        )


class WeightShapeError(ValueError):
    """Signals that sample weights have an axis that the values of the loss do not have."""


def check_loss(loss: keras.losses.Loss, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
    """Raises NeedsOtherTowers if `loss_fault` finds one, or a custom loss cannot be traced."""
    is_keras = getattr(getattr(loss, "fn", loss), "__module__", "").startswith("keras.")
    try:
        fault = loss_fault(loss, y, y_pred, sample_weight)
        why = "" if fault is None else f"{line_of(fault.operation)} {fault.what}"
    except Exception as error:  # a custom loss may raise anything
        if is_keras or isinstance(error, WeightShapeError | BatchInCode):
            raise
        first_line = f"{error}".strip().partition("\n")[0]
        why = f"it cannot be traced alone ({type(error).__name__}: {first_line})"
    if why:
        labels, outputs = (getattr(v, "shape", "of several parts") for v in (y, y_pred))
        raise NeedsOtherTowers(
            f"{_name(loss)} is neither a mean nor a sum over the examples: {why} (labels {labels}, "
            f"outputs {outputs}). Return a value for each example, or use "
            "towers.make_parallel(model, gpus): its fit gathers all rows."
        )


def loss_fault(
    loss: keras.losses.Loss, y: Any, y_pred: Any, sample_weight: Any = None
) -> Fault | None:
    """Returns the operation after which a loss is neither a mean nor a sum; None if it is one.

    The loss is traced in a scratch graph, on symbolic tensors [n, ...] or their specs. It may read
    tensors of the caller's graph, and its assignments have no effect.
    """
    found: list[Fault | None] = []
    specs = batch_specs([y, y_pred, sample_weight, keras_mask(y_pred)])

    def judge(*flat: Any) -> None:
        rows = Rows.of_shard(flat)
        # A tf.function would make tuples of lists, which Keras does not match with lists.
        y, y_pred, sample_weight, mask = tf.nest.pack_sequence_as(specs, flat)
        if mask is not None:
            y_pred = marked(y_pred, {"mask": mask})
        # `shard_weight` knows the denominators of Keras' own reductions.
        unreduced = loss if overrides_call(loss) else with_reduction(loss, "none")
        if sample_weight is not None and not overrides_call(loss):
            _check_weight_shape(loss, unreduced(y, y_pred), sample_weight)
        value = tf.convert_to_tensor(unreduced(y, y_pred, sample_weight))
        fact = rows.fact(value)
        expected = int(loss_reduction(loss) == "sum" and not fact.has_rows)
        fault = None if fact.degree == expected else Fault(value.op, *UNEVEN)
        if fact.has_rows and fact.each is None:
            fault = Fault(value.op, CHOSEN)
        found.append(fact.fault or fault)
        check_no_fixed_batch(value.graph, Dependence(components(flat)))

    with tf.device(None), keras.StatelessScope(), read_as_they_are(), gathered_by(None):
        tf.function(judge, autograph=False).get_concrete_function(*tf.nest.flatten(specs))
    return found[-1]


def _check_weight_shape(loss: keras.losses.Loss, values: Any, sample_weight: Any) -> None:
    """Raises WeightShapeError if weights have axes that the values of a loss do not have.

    TensorFlow would align the last axes, and apply one example's weights to all examples.
    """
    shape, given = (tf.TensorShape(getattr(v, "shape", None)) for v in (values, sample_weight))
    more = 0 if None in (shape.rank, given.rank) else given.rank - shape.rank
    if more > 1 or more == 1 and given[-1] not in (1, None):
        raise WeightShapeError(
            f"sample_weight has the shape {tuple(given)}, and {_name(loss)} has values of the "
            f"shape {tuple(shape)}. Give one weight for each example, or for each value."
        )


def _name(loss: keras.losses.Loss) -> str:
    """Returns a loss's name for messages; a function's name comes with the line that defines it."""
    code = getattr(getattr(loss, "fn", None), "__code__", None)
    if code is None or type(loss) is not type(function_loss(len)):
        return f"loss {loss.name!r}"
    return f"loss {code.co_name!r} ({Path(code.co_filename).name}:{code.co_firstlineno})"
