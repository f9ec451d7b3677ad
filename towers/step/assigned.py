"""What a tower's forward pass assigns to variables, and how the towers' values become one.

| the value                                     | after the step                            |
| --------------------------------------------- | ----------------------------------------- |
| depends on no shard: a count of steps,        | tower 0's, which all towers have          |
|     SpectralNormalization's kernel            |                                           |
| a random seed                                 | tower 0's: advanced once                  |
| BatchNormalization's statistics               | their weighted mean, or tower 0's         |
| aggregation="mean"                            | their weighted mean                       |
| aggregation="sum", old + x: a metric's, rows  | old + the sum of the towers' x; an x that |
|     that were seen                            |     is a mean over the rows weighs n_t / N|
| any other: a mean over rows; old + a sum      | their weighted mean; old + their sums     |
| aggregation="only_first_replica"              | tower 0's                                 |
| anything else                                 | tower 0's, with a warning; of a parameter |
|                                               |     or a metric refused                   |

Weighted: by the towers' examples. Whether a value depends on the shard stands in the traced graph.
"""

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.levels.dependence import Dependence
from towers.levels.lines import current_line, is_of_keras
from towers.rows.rows import Rows
from towers.step.raw_variables import read_as_they_are, variable_behind
from towers.step.state import is_seed

_PASSED_ON = ("Identity", "StopGradient", "IdentityN")


class Assigned(NamedTuple):
    """What a tower hands back for its variables, by their index.

    same: the value that all towers have, or that tower 0's is taken for.
    means: the tower's part of the weighted mean: the new value is the sum over all towers.
    sums: what the tower adds: the new value is the old one and the sum over all towers.
    """

    same: dict[int, tf.Tensor]
    means: dict[int, tf.Tensor]
    sums: dict[int, tf.Tensor]


NOTHING = Assigned({}, {}, {})


class Averaged(NamedTuple):
    """The ids of the variables that are not what their aggregation says.

    means: BatchNormalization's statistics, where they are averaged. first: where they are not.
    """

    means: set[int]
    first: set[int]


@tf.custom_gradient
def _in_place_of(parameter: tf.Tensor, value: tf.Tensor) -> Any:
    """The value, with the gradient of the parameter that it was assigned to."""
    return tf.identity(value), lambda gradient: (gradient, None)


class TowerScope(keras.StatelessScope):
    """Within, variables take their values from here, and leave them here.

    unknown: variables that were met and have no value here, by id.
    """

    def __init__(self, known: Iterable[tuple[Any, tf.Tensor]], num_parameters: int) -> None:
        """
        Args:
            known: (variable, value in the trace) of parameters, then of state.
            num_parameters: how many of these are trained.
        """
        super().__init__(collect_losses=True)
        self._graph = tf.compat.v1.get_default_graph()
        self._variables, self._before = [], {}
        for variable, value in known:
            self._variables.append(variable)
            self.state_mapping[id(variable)] = self._before[id(variable)] = value
        self._parameters = {id(v) for v in self._variables[:num_parameters]}
        self._lines: dict[int, str] = {}
        self._made: list[str] = []
        self.unknown: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> tf.Tensor | None:
        """What the tower reads; None of a variable that is made in the trace."""
        if id(variable) not in self.state_mapping:
            self._meet(variable)
        return self.state_mapping.get(id(variable))

    def _meet(self, variable: Any) -> None:
        stored = variable_behind(variable)
        if stored is None:
            self._made.append(f"{current_line()} makes variable {variable.path!r}")
            return
        self.unknown[id(variable)] = variable
        with self._graph.as_default(), read_as_they_are():
            value = tf.convert_to_tensor(stored)
        self.state_mapping[id(variable)] = self._before[id(variable)] = value

    def add_update(self, update: tuple[Any, tf.Tensor]) -> None:
        """What the tower assigns: read again, it has no gradient, as in Keras."""
        variable, value = update
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError(
                f"{current_line()} assigns {variable.path} inside of a tf.function, a tf.cond or a "
                "loop, out of which towers cannot take it. Compute the value there, and assign it "
                "after that."
            )
        before = self.get_current_value(variable)
        self._lines[id(variable)] = current_line()
        if id(variable) in self._parameters:
            value = _in_place_of(before, value)
        else:
            value = tf.stop_gradient(value)
        super().add_update((variable, value))

    def changed(self) -> list[tuple[int, Any, tf.Tensor, tf.Tensor]]:
        """(index, variable, value before, value after) of what was assigned so far.

        Raises:
            ValueError: variables were made.
        """
        if self._made:
            raise ValueError(
                f"{self._made[0]} while the model is called. Make variables in __init__ or build, "
                "or call the model on a batch first."
            )
        pairs = [(self._before[id(v)], self.state_mapping[id(v)]) for v in self._variables]
        return [
            (i, v, before, after)
            for i, (v, (before, after)) in enumerate(zip(self._variables, pairs, strict=True))
            if after is not before
        ]

    def is_parameter(self, variable: Any) -> bool:
        """Whether a variable is trained."""
        return id(variable) in self._parameters

    def line(self, variable: Any) -> str:
        """The user's line that assigned a variable last."""
        return self._lines[id(variable)]


def leave(
    variables: Sequence[Any],
    assigned: Assigned,
    same: Mapping[int, tf.Tensor],
    sums: Sequence[tf.Tensor],
) -> None:
    """Stores what towers have assigned.

    Args:
        variables: those that the indices are of.
        assigned: of a tower; only its indices count.
        same: tower 0's.
        sums: over all towers, of `means` and then of `sums`.
    """
    for i, value in same.items():
        variables[i].assign(value)
    for i, value in zip([*assigned.means, *assigned.sums], sums, strict=True):
        old = tf.convert_to_tensor(variables[i].value) if i in assigned.sums else None
        variables[i].assign(value if old is None else old + tf.cast(value, old.dtype))


class ShardFacts(NamedTuple):
    """What is known of the tensors of a tower's trace.

    dependence: whether they depend on the shard. rows: what they are of its rows.
    weight: scalar float64, n_t / N; 0 where one row stands for an empty shard.
    """

    dependence: Dependence
    rows: Rows
    weight: tf.Tensor

    def is_sum(self, tensor: tf.Tensor) -> bool:
        """Whether the towers' values of a tensor add up to the batch's."""
        return self.rows.kind(tensor).name == "sum"


def what_becomes_of(
    changed: Sequence[tuple[int, Any, tf.Tensor, tf.Tensor]],
    scope: TowerScope,
    shard: ShardFacts,
    averaged: Averaged,
) -> Assigned:
    """Sorts what a forward pass has assigned by how the towers' values become one.

    Args:
        changed: of the scope.
        scope: of the forward pass.
        shard: what is known of the trace.
        averaged: variables with a rule of their own.

    Raises:
        ValueError: each tower would assign another value to a parameter, or to a metric's variable.

    Warns:
        UserWarning: the same of any other, and nothing says how they become one.
    """
    assigned = Assigned({}, {}, {})
    for i, variable, before, after in changed:
        is_local = shard.dependence.local(after)
        is_first = variable.aggregation == "only_first_replica" or id(variable) in averaged.first
        is_mean = variable.aggregation == "mean" or id(variable) in averaged.means
        added = _added(after, before)
        if not is_local or is_seed(variable) or is_first:
            assigned.same[i] = after
        elif scope.is_parameter(variable):
            raise _refused(variable, scope, "Assign parameters what no row has a part in.")
        elif is_mean and after.dtype.is_floating:
            assigned.means[i] = _weighted(after, shard.weight)
        elif variable.aggregation == "sum" and not _can_be_added(added, shard):
            raise _refused(variable, scope, "Add to it, by assign_add, what the shard's rows add.")
        elif variable.aggregation == "sum" or added and all(map(shard.is_sum, added)):
            parts = [_part(x, variable, shard) for x in added]
            assigned.sums[i] = functools.reduce(tf.add, parts)
        elif after.dtype.is_floating and shard.rows.kind(after).name == "mean":
            assigned.means[i] = _weighted(after, shard.weight)
        else:
            _warn_of_first(variable, scope)
            assigned.same[i] = after
    return assigned


def _can_be_added(added: Sequence[tf.Tensor], shard: ShardFacts) -> bool:
    """Whether towers' additions add up: an integer that each tower adds for the batch does not."""
    return bool(added) and all(x.dtype.is_floating or shard.dependence.local(x) for x in added)


def _warn_of_first(variable: Any, scope: TowerScope) -> None:
    warnings.warn(
        f"{scope.line(variable)} assigns variable {variable.path!r} what it computes of a shard: "
        "every tower has a value of its own, and tower 0's is kept. Make the variable with "
        'aggregation="mean" or "sum"; or assign it what is computed of towers.gather(rows), the '
        "rows of all towers, in a train_step of the model's own.",
        stacklevel=2,
    )


def _refused(variable: Any, scope: TowerScope, way_out: str) -> ValueError:
    return ValueError(
        f"{scope.line(variable)} assigns variable {variable.path!r} what it computes of a shard: "
        f"every tower has a value of its own. {way_out} Or compute it of towers.gather(rows), the "
        "rows of all towers, with towers.make_parallel(model, gpus)."
    )


def _part(added: tf.Tensor, variable: Any, shard: ShardFacts) -> tf.Tensor:
    """A tower's part of what all add: Keras' metrics add sums, a user's may add means."""
    kind = shard.rows.kind(added)
    if kind.fault and not is_of_keras(kind.fault.operation, "metrics"):
        shard.rows.check(added, f"what variable {variable.path!r} adds up")
    if kind.name == "mean" and added.dtype.is_floating:
        return _weighted(added, shard.weight)
    return tf.where(shard.weight > 0, added, tf.zeros_like(added))


def _weighted(value: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    return value * tf.cast(weight, value.dtype)


def _added(value: tf.Tensor, before: tf.Tensor) -> list[tf.Tensor]:
    """Every x of a value that is before + x + ...: a difference would be rounded. Else empty."""
    found: list[tf.Tensor] = []
    while value is not before:
        operation = value.op
        if operation.type in _PASSED_ON:
            value = operation.inputs[value.value_index]
        elif operation.type in ("AddV2", "Sub"):
            value, x = operation.inputs
            found.append(x if operation.type == "AddV2" else -x)
        else:
            return []
    return found
