"""Makes the model's outputs for the global batch from the outputs of all towers.

    rows: one or more for each example             joined in order, with masks and logits
    a mean or a sum over the examples              added up over the towers
    a value that no example has a part in          tower 0's
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.machine.loss_internals import marked
from towers.step.assigned import Assigned
from towers.step.averaging import Values
from towers.step.shard_facts import ShardFacts
from towers.step.structures import Structure, map_tensors


def as_tensors(outputs: Structure) -> Any:
    """The outputs of a model as tensors: Keras takes Python numbers, too."""
    return map_tensors(lambda v: v if tf.is_tensor(v) else keras.ops.convert_to_tensor(v), outputs)


def without_rows(
    predictions: Sequence[tf.Tensor], facts: ShardFacts, *, is_alone: bool
) -> Assigned:
    """Finds the outputs that have no batch axis: tower 0's values, or each tower's parts.

    Args:
        predictions: the flattened outputs.
        facts: the facts of the trace.
        is_alone: whether there is one tower.

    Raises:
        ValueError: an output is neither a mean nor a sum over the batch's rows.
    """
    whole = Assigned({}, {})
    for i, value in enumerate(predictions):
        if facts.has_rows(value):
            if not is_alone:
                facts.rows.check(value, "an output of the model")
            continue
        if is_alone or not facts.dependence.local(value):
            whole.same[i] = value
        else:
            whole.parts[i] = facts.part_of_output(value)
    return whole


def join_outputs(
    outputs: Sequence[Any],
    join: Callable[[list[tf.Tensor]], tf.Tensor],
    of_tower_0: Callable[[list[tf.Tensor]], Sequence[tf.Tensor | None]],
    add: Callable[[list[Values]], Values],
) -> list[tf.Tensor | None]:
    """The model's flattened outputs for the global batch.

    Args:
        outputs: this worker's TowerOutputs.
        join: makes the global batch's rows of one tensor from each tower.
        of_tower_0: gives tower 0's values, given the first tower's.
        add: sums T towers x V values over the towers.
    """
    same, parts = outputs[0].whole
    found: dict[int, tf.Tensor | None] = {}
    for i, value in enumerate(outputs[0].predictions):
        if value is not None and i not in same and i not in parts:
            found[i] = marked(join([output.predictions[i] for output in outputs]), {
                name: join([output.marks[i][name] for output in outputs])
                for name in outputs[0].marks[i]
            })
    if same:
        found |= zip(same, of_tower_0(list(same.values())), strict=True)
    if parts:
        added = add([list(output.whole.parts.values()) for output in outputs])
        found |= zip(parts, added, strict=True)
    return [found.get(i) for i in range(len(outputs[0].predictions))]
