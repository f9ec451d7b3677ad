"""Refuses what a step takes from outside that is no value and no variable of Keras'."""

from typing import Any

import tensorflow as tf

from towers.levels.cut import captures
from towers.levels.lines import line_of
from towers.own_step.variables import VariableScope

_OF_VARIABLES = ("ReadVariableOp", "ResourceGather", "Assign", "ResourceScatter", "VariableShape")
_OF_TABLES = ("LookupTable",)


def check_no_foreign_resources(function: Any, scope: VariableScope) -> None:
    """Raises ValueError for a tf.Variable, a lookup table, and whatever else has a state.

    Args:
        function: the traced step.
        scope: which knows the reads of Keras' variables.
    """
    known = scope.read_names
    for handle, placeholder in captures(function):
        if placeholder.dtype not in (tf.resource, tf.variant):
            continue
        for user in placeholder.consumers():
            if not any(output.name in known for output in user.outputs):
                raise ValueError(f"{line_of(user)} uses {_what(user, handle, function)}")


def _what(user: tf.Operation, handle: Any, function: Any) -> str:
    if user.type.startswith(_OF_TABLES):
        return (
            "a lookup table, which towers cannot copy into their graphs. Look the values up in the "
            "data pipeline: dataset.map(layer)."
        )
    names = [v.name for v in function.variables if v.handle is handle]
    if names or user.type.startswith(_OF_VARIABLES):
        name = f" {names[0]!r}" if names else ""
        return (
            f"tf.Variable{name}, which Keras does not track, so that towers cannot tell what it "
            "becomes. Create it with add_weight or keras.Variable, and draw noise from "
            "keras.random with a keras.random.SeedGenerator."
        )
    return (
        f"{user.type}, which has a state of its own outside of the step. Take it out of the step, "
        "into a callback or the data pipeline."
    )
