"""Decides from a loss's graph whether the towers' losses add up to the global batch's loss.

    one value for each row         works with any reduction (`losses.shard_weight`).
    a mean over the rows           is weighted by n_t / N.
    a sum over the rows            works with reduction="sum": the towers' values add up.
    neither, such as Dice, the     needs the rows of all towers.
    root of a mean, or a mean
    over a mask

The loss is traced once on symbolic rows, and `towers.graph` walks its graph; nothing is computed.
"""

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from towers.graph.dependence import Dependence
from towers.machine.loss_internals import function_loss, keras_mask, marked
from towers.machine.user_lines import line_of
from towers.graph.facts import CHOSEN, UNEVEN, Fact, Fault
from towers.graph.rows import Rows
from towers.step.fixed_batch import BatchInCode, check_no_fixed_batch
from towers.step.gathering import NeedsOtherTowers, gathered_by
from towers.step.outputs import loss_reduction, overrides_call, with_reduction
from towers.step.raw_variables import read_as_they_are
from towers.step.structures import batch_specs


class NeitherMeanNorSum(NeedsOtherTowers):
    """Signals that the towers' losses do not add up to the loss of the global batch."""


class WeightShapeError(ValueError):
    """Signals that sample weights have an axis that the values of the loss do not have."""


def check_loss(
    loss: keras.losses.Loss, y: Any, y_pred: Any, sample_weight: Any = None
) -> None:
    """Raises NeitherMeanNorSum if `loss_fault` finds an operation, or the loss cannot be traced.

    Raises WeightShapeError for sample weights that do not fit the loss, and BatchInCode if its code
    fixes the batch size.
    """
    try:
        fault = loss_fault(loss, y, y_pred, sample_weight)
        why = "" if fault is None else f"{line_of(fault.operation)} {fault.what}"
    except (WeightShapeError, BatchInCode):
        raise
    except Exception as error:  # a custom loss may raise anything
        first_line = f"{error}".strip().partition("\n")[0]
        why = f"it cannot be traced alone ({type(error).__name__}: {first_line})"
    if why:
        raise NeitherMeanNorSum(
            f"{_name(loss)} is neither a mean nor a sum over the examples: {why}. Each tower has "
            "only its own rows of the batch. Use towers.make_parallel(model, gpus), whose fit "
            "gathers the rows of all towers for this loss; or return one value for each example."
        )


def loss_fault(
    loss: keras.losses.Loss, y: Any, y_pred: Any, sample_weight: Any = None
) -> Fault | None:
    """Returns the operation after which a loss is neither a mean nor a sum; None if it is one.

    The loss is traced in a scratch graph. It may read tensors of the caller's graph, and its
    assignments have no effect.

    Args:
        loss: a Keras loss.
        y, y_pred, sample_weight: the loss's arguments, symbolic tensors [n, ...] or their specs;
            sample_weight may be None, and y_pred may carry a mask.
    """
    found: list[Fault | None] = []

    specs = batch_specs([y, y_pred, sample_weight, keras_mask(y_pred)])
    flat_specs = tf.nest.flatten(specs)

    def judge(*given: Any) -> None:
        rows, waiting = Rows.of_shard(given), iter(given)
        flat = [None if spec is None else next(waiting) for spec in flat_specs]
        # A tf.function would make tuples of lists, which Keras does not match with lists.
        y, y_pred, sample_weight, mask = tf.nest.pack_sequence_as(specs, flat)
        if mask is not None:
            y_pred = marked(y_pred, {"mask": mask})
        # `shard_weight` knows the denominators of Keras' own reductions.
        unreduced = loss if overrides_call(loss) else with_reduction(loss, "none")
        if sample_weight is not None and not overrides_call(loss):
            _check_weight_shape(loss, unreduced(y, y_pred), sample_weight)
        value = tf.convert_to_tensor(unreduced(y, y_pred, sample_weight))
        found.append(_fault(value, rows.fact(value), loss_reduction(loss)))
        dependence = Dependence()
        for tensor in tf.nest.flatten(given, expand_composites=True):
            dependence.feed(tensor, local=True, level=0)
        check_no_fixed_batch(value.graph, dependence)

    with tf.device(None), keras.StatelessScope(), read_as_they_are(), gathered_by(None):
        tf.function(judge, autograph=False).get_concrete_function(
            *[spec for spec in flat_specs if spec is not None]
        )
    return found[-1]


def _check_weight_shape(loss: keras.losses.Loss, values: Any, sample_weight: Any) -> None:
    """Raises WeightShapeError if weights have axes that the values of a loss do not have.

    TensorFlow would align the last axes, and apply one example's weights to all examples.
    """
    shape, given = (tf.TensorShape(getattr(v, "shape", None)) for v in (values, sample_weight))
    if shape.rank is None or given.rank is None or given.rank <= shape.rank:
        return
    if given.rank > shape.rank + 1 or given[-1] not in (1, None):
        raise WeightShapeError(
            f"sample_weight has the shape {tuple(given)}, and {_name(loss)} has values of the "
            f"shape {tuple(shape)}, where None is the number of examples. Give one weight for "
            "each example, or for each value."
        )


def _fault(value: tf.Tensor, fact: Fact, reduction: str) -> Fault | None:
    if fact.fault:
        return fact.fault
    if fact.has_rows and fact.each is None:
        return Fault(value.op, CHOSEN)
    expected = int(reduction == "sum" and not fact.has_rows)
    return None if fact.degree == expected else Fault(value.op, *UNEVEN)


def _name(loss: keras.losses.Loss) -> str:
    """Returns a loss's name for messages; a function's name comes with the line that defines it."""
    code = getattr(getattr(loss, "fn", None), "__code__", None)
    if code is None or type(loss) is not type(function_loss(len)):
        return f"loss {loss.name!r}"
    return f"loss {code.co_name!r} ({Path(code.co_filename).name}:{code.co_firstlineno})"
