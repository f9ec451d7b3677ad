"""Merges the values that towers assign to variables into one value for each variable.

| assigned value                                | value after the step                      |
| --------------------------------------------- | ----------------------------------------- |
| a value that depends on no shard: a count of  | tower 0's value, which all towers have    |
|     steps, SpectralNormalization's kernel     |                                           |
| a random seed                                 | tower 0's seed, advanced once             |
| BatchNormalization's statistics               | their weighted mean, or tower 0's         |
| a value with aggregation="only_first_replica" | tower 0's value                           |
| a + b + ...: a depends on no shard (the old   | a once, plus the sum of b over all        |
|     value, its decay), b is a sum over rows   |     towers; b is weighted first if it is  |
|     (a metric's total, a count of rows) or a  |     a mean                                |
|     mean over them                            |                                           |
| any other value, aggregation="mean"           | the weighted mean, with a warning         |
| any other value, aggregation="sum": old + x   | old + the sum of all x, with a warning    |
| any other value                               | tower 0's value, with a warning; with     |
|                                               |     aggregation="sum" a ValueError        |

Weights are n_t / N. A parameter's value must not depend on a shard, except in a custom step; the
graph shows which do.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine.user_lines import current_line, is_of_keras, line_of, warn_user
from towers.step.loss_kinds import ShardFacts
from towers.step.raw_variables import read_as_they_are, variable_behind
from towers.step.state import is_seed


class Assigned(NamedTuple):
    """Holds the values that one tower assigns; both dicts are keyed by variable index."""

    same: dict[int, tf.Tensor]  # values that all towers agree on, or that are taken from tower 0
    parts: dict[int, tf.Tensor]  # this tower's summands; their sum over towers is added to `same`


@tf.custom_gradient
def _in_place_of(parameter: tf.Tensor, value: tf.Tensor) -> Any:
    """Returns `value`; its gradient flows to the parameter that it was assigned to."""
    return tf.identity(value), lambda gradient: (gradient, None)


class TowerScope(keras.StatelessScope):
    """Redirects reads and assignments of variables to values in the trace."""

    def __init__(self, known: Iterable[tuple[Any, tf.Tensor]], num_parameters: int) -> None:
        """Args: known: (variable, value in the trace) pairs; parameters are first."""
        super().__init__(collect_losses=True)
        self._graph = tf.compat.v1.get_default_graph()
        self._known = list(known)
        self.state_mapping.update({id(variable): value for variable, value in self._known})
        self.parameters = {id(variable) for variable, _ in self._known[:num_parameters]}
        self.lines: dict[int, str] = {}  # by id, the user's line that assigned a variable last
        self._made: list[tuple[Any, str]] = []
        self.unknown: dict[int, Any] = {}  # by id, variables that were read and are not in `known`

    def get_current_value(self, variable: Any) -> tf.Tensor | None:
        """Returns the value that the tower reads; None for a variable that the trace creates."""
        if id(variable) not in self.state_mapping:
            stored = variable_behind(variable)
            if stored is None:
                self._made.append((variable, current_line()))
                return None
            self.unknown[id(variable)] = variable
            with self._graph.as_default(), read_as_they_are():
                self.state_mapping[id(variable)] = tf.convert_to_tensor(stored)
        return self.state_mapping[id(variable)]

    def as_now(self) -> "TowerScope":
        """Returns a new scope that starts from the current values of this one."""
        values = [(variable, self.state_mapping[id(variable)]) for variable, _ in self._known]
        return TowerScope(values, len(self.parameters))

    def add_update(self, update: tuple[Any, tf.Tensor]) -> None:
        """Records a (variable, value) pair; only a parameter's value keeps its gradient."""
        variable, value = update
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError(
                f"{current_line()} assigns {variable.path} inside of a tf.function, a tf.cond or a "
                "loop. Compute the value there, and assign it after that."
            )
        before = self.get_current_value(variable)
        self.lines[id(variable)] = current_line()
        is_parameter = id(variable) in self.parameters
        value = _in_place_of(before, value) if is_parameter else tf.stop_gradient(value)
        super().add_update((variable, value))

    def changed(self) -> list[tuple[int, Any, tf.Tensor, tf.Tensor]]:
        """Returns (index, variable, value before, value after) of each variable assigned so far."""
        self.check_none_made(trainable=False)
        return [
            (i, variable, before, after)
            for i, (variable, before) in enumerate(self._known)
            if (after := self.state_mapping[id(variable)]) is not before
        ]

    def check_none_made(self, *, trainable: bool) -> None:
        """Raises ValueError if the trace made (trainable) variables: they would be constants."""
        for variable, line in self._made:
            if variable.trainable or not trainable:
                raise ValueError(
                    f"{line} makes variable {variable.path!r} while a step is traced. Make "
                    "variables in __init__ or build, or call the layer on a batch first."
                )


def assign_merged(
    variables: Sequence[Any], same: Mapping[int, tf.Tensor], sums: Mapping[int, tf.Tensor]
) -> None:
    """Assigns `same` + `sums`, tower 0's `Assigned.same` and the sums of `Assigned.parts`."""
    for i in {**same, **sums}:
        values = [values[i] for values in (same, sums) if i in values]
        variables[i].assign(functools.reduce(tf.add, values))


def what_becomes_of(
    changed: Sequence[tuple[int, Any, tf.Tensor, tf.Tensor]], scope: TowerScope, shard: ShardFacts,
    statistics: Collection[int], takes_first: bool,
) -> Assigned:
    """Sorts the values of `scope.changed()` by how they are merged over the towers.

    statistics: the ids of BatchNormalization's statistics. They are averaged, unless `takes_first`.
    """
    assigned = Assigned({}, {})
    for i, variable, before, after in changed:
        line, is_first = scope.lines[id(variable)], variable.aggregation == "only_first_replica"
        if id(variable) in scope.parameters and shard.dependence.local(after) and not is_first:
            raise ValueError(
                _of_a_shard(variable, line) + "Assign parameters what no row has a part in."
                + _OR_GATHER
            )
        merged = terms_of_new(variable, after, shard, statistics, takes_first, line, before)
        for found, terms in zip(assigned, merged, strict=True):
            if terms:
                found[i] = functools.reduce(tf.add, terms)
    return assigned


def without_rows(
    predictions: Sequence[tf.Tensor], facts: ShardFacts, *, is_alone: bool
) -> Assigned:
    """Returns the flattened outputs without a batch axis, by index, by how they are merged."""
    whole = Assigned({}, {})
    for i, value in enumerate(predictions):
        if facts.has_rows(value):
            if not is_alone:
                facts.rows.check(value, "an output of the model")
        elif is_alone or not facts.dependence.local(value):
            whole.same[i] = value
        else:
            part = facts.known_part(value)
            if part is None:
                fault = facts.rows.kind(value).fault
                reason = f"{line_of(fault.operation)} {fault.what}" if fault else "it has no rows"
                raise ValueError(
                    f"an output of the model, of shape {value.shape}, is neither a value for each "
                    f"example nor a mean or a sum over the examples: {reason}. Compute the output "
                    "from each example." + _OR_GATHER
                )
            whole.parts[i] = part
    return whole


def terms_of_new(
    variable: Any, value: tf.Tensor, facts: ShardFacts, statistics: Collection[int],
    takes_first: bool, line: str, before: tf.Tensor | None = None,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Splits an assigned value into (terms that count once, this tower's summands of the rest).

    If towers disagree about a term that counts once, tower 0's is used. line: the user's, which
    assigns the value. before: the old value, to which aggregation="sum" adds, or None to ignore it.
    """
    is_statistic = id(variable) in statistics
    is_first = is_statistic and takes_first or variable.aggregation == "only_first_replica"
    if not facts.dependence.local(value) or is_seed(variable) or is_first:
        return [value], []
    if is_statistic:
        return [], [facts.weighted(value)]
    same, own = terms_of(value, facts)
    parts = list(map(facts.known_part, own))
    if all(part is not None for part in parts):
        return same, parts
    if variable.aggregation == "sum" and before is not None:
        if not (len(same) == 1 and same[0] is before):
            raise ValueError(
                _of_a_shard(variable, line)
                + "Add to it, by assign_add, what the shard's rows add." + _OR_GATHER
            )
        for term in own:
            fault = facts.rows.kind(term).fault
            if fault and not is_of_keras(fault.operation, "metrics"):
                facts.rows.check(term, f"what variable {variable.path!r} adds up")
        pairs = zip(own, parts, strict=True)
        return same, [facts.masked(term) if part is None else part for term, part in pairs]
    if variable.aggregation == "mean" and value.dtype.is_floating:
        facts.rows.check(value, f"what is assigned to variable {variable.path!r}")
        return [], [facts.weighted(value)]
    warn_user(
        _of_a_shard(variable, line) + "Tower 0's value is kept. Make the variable with "
        'aggregation="mean" or "sum".' + _OR_GATHER,
    )
    return [value], []


def terms_of(value: tf.Tensor, facts: ShardFacts) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Splits a sum, or a multiple of one, into (terms that depend on no shard, terms that do)."""
    operation, is_local = value.op, facts.dependence.local
    if operation.type in ("Identity", "StopGradient", "IdentityN"):
        return terms_of(operation.inputs[value.value_index], facts)
    if not is_local(value):
        return [value], []
    if operation.type in ("AddV2", "Sub"):
        (same, own), (same_too, own_too) = (terms_of(v, facts) for v in operation.inputs)
        if operation.type == "Sub":
            same_too, own_too = ([tf.negative(v) for v in terms] for terms in (same_too, own_too))
        return same + same_too, own + own_too
    if operation.type == "Mul" and not all(map(is_local, operation.inputs)):
        factor, product = sorted(operation.inputs, key=is_local)
        same, own = terms_of(product, facts)
        return [factor * term for term in same], [factor * term for term in own]
    return [], [value]


_OR_GATHER = (
    " Or compute it from towers.gather(rows), the rows of all towers, with "
    "towers.make_parallel(model, gpus)."
)


def _of_a_shard(variable: Any, line: str) -> str:
    """Returns the beginning of a message about a value that differs between towers."""
    return (
        f"{line} assigns variable {variable.path!r} a value that it computes from a shard, so each "
        "tower has another value. "
    )
