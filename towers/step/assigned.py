"""Merges the values that towers assign to variables into one value for each variable. Custom steps
differ in two rows, which variables.py describes.

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

Weights are n_t / N. A parameter's value must not depend on a shard; the graph shows which do.
"""

import functools
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine.user_lines import current_line, is_of_keras, line_of
from towers.step.loss_kinds import ShardFacts
from towers.step.raw_variables import read_as_they_are, variable_behind
from towers.step.state import is_seed

_PASSED_ON = ("Identity", "StopGradient", "IdentityN")


class Assigned(NamedTuple):
    """Holds the values that one tower assigns; both dicts are keyed by variable index.

    same: values that all towers agree on, or that are taken from tower 0.
    parts: this tower's summand of a value; the sum over all towers is added to `same`.
    """

    same: dict[int, tf.Tensor]
    parts: dict[int, tf.Tensor]


NOTHING = Assigned({}, {})


@tf.custom_gradient
def _in_place_of(parameter: tf.Tensor, value: tf.Tensor) -> Any:
    """Returns `value`; its gradient flows to the parameter that it was assigned to."""
    return tf.identity(value), lambda gradient: (gradient, None)


class TowerScope(keras.StatelessScope):
    """Redirects reads and assignments of variables to values in the trace.

    unknown: by id, variables that were read without being listed in `known`.
    """

    def __init__(self, known: Iterable[tuple[Any, tf.Tensor]], num_parameters: int) -> None:
        """
        Args:
            known: pairs of a variable and its value in the trace: parameters, then state.
            num_parameters: the number of pairs that are parameters.
        """
        super().__init__(collect_losses=True)
        self._graph = tf.compat.v1.get_default_graph()
        self._variables, self._before = [], {}
        for variable, value in known:
            self._variables.append(variable)
            self.state_mapping[id(variable)] = self._before[id(variable)] = value
        self._parameters = {id(v) for v in self._variables[:num_parameters]}
        self._lines: dict[int, str] = {}
        self._made: list[tuple[Any, str]] = []
        self.unknown: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> tf.Tensor | None:
        """Returns the value that the tower reads; None for a variable that the trace creates."""
        if id(variable) not in self.state_mapping:
            stored = variable_behind(variable)
            if stored is None:
                self._made.append((variable, current_line()))
                return None
            self.unknown[id(variable)] = variable
            with self._graph.as_default(), read_as_they_are():
                value = tf.convert_to_tensor(stored)
            self.state_mapping[id(variable)] = self._before[id(variable)] = value
        return self.state_mapping[id(variable)]

    def as_now(self) -> "TowerScope":
        """Returns a new scope that starts from the current values of this one."""
        values = [(v, self.state_mapping[id(v)]) for v in self._variables]
        return TowerScope(values, len(self._parameters))

    def add_update(self, update: tuple[Any, tf.Tensor]) -> None:
        """Records a (variable, value) pair; only parameters' values keep a gradient, as in Keras.

        Raises ValueError for an assignment in a tf.function, a tf.cond or a loop.
        """
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
        """Returns (index, variable, value before, value after) of each variable assigned so far.

        Raises:
            ValueError: the trace has created variables.
        """
        self.check_none_made(trainable=False)
        pairs = [(self._before[id(v)], self.state_mapping[id(v)]) for v in self._variables]
        return [
            (i, v, before, after)
            for i, (v, (before, after)) in enumerate(zip(self._variables, pairs, strict=True))
            if after is not before
        ]

    def check_none_made(self, *, trainable: bool) -> None:
        """Raises ValueError if the trace has created variables: they would become constants.

        Args:
            trainable: check trainable variables only, so that a `compute_loss` may create metrics.
        """
        for variable, line in self._made:
            if variable.trainable or not trainable:
                raise ValueError(
                    f"{line} makes variable {variable.path!r} while a step is traced. Make "
                    "variables in __init__ or build, or call the layer on a batch first."
                )

    def is_parameter(self, variable: Any) -> bool:
        """Whether a variable is one of the trained parameters."""
        return id(variable) in self._parameters

    def line(self, variable: Any) -> str:
        """Returns the user's line that assigned a variable last."""
        return self._lines[id(variable)]


def assign_merged(
    variables: Sequence[Any],
    same: Mapping[int, tf.Tensor],
    sums: Mapping[int, tf.Tensor],
) -> None:
    """Assigns the merged values of all towers to the model's variables.

    Args:
        variables: the variables that the keys of `same` and `sums` index.
        same: tower 0's `Assigned.same`.
        sums: the sums of `Assigned.parts` over all towers; each is added to `same`, if both exist.
    """
    for i in {**same, **sums}:
        values = [values[i] for values in (same, sums) if i in values]
        variables[i].assign(functools.reduce(tf.add, values))


def what_becomes_of(
    changed: Sequence[tuple[int, Any, tf.Tensor, tf.Tensor]],
    scope: TowerScope,
    shard: ShardFacts,
    statistics: Collection[int],
    takes_first: bool,
) -> Assigned:
    """Sorts the values that a forward pass assigns by how they are merged over the towers.

    Args:
        changed: (index, variable, value before, value after) tuples from `scope.changed()`.
        scope: the scope of the forward pass.
        shard: the facts about the traced tensors.
        statistics: the ids of BatchNormalization's statistics, which are averaged.
        takes_first: take tower 0's statistics instead.

    Raises:
        ValueError: a parameter's value depends on the shard, or a variable with aggregation="sum",
            such as a metric's, gets a value that cannot be added up.

    Warns:
        UserWarning: another variable's value depends on the shard, and no rule merges it.
    """
    assigned = Assigned({}, {})
    for i, variable, before, after in changed:
        is_first = variable.aggregation == "only_first_replica"
        if scope.is_parameter(variable) and shard.dependence.local(after) and not is_first:
            raise _refused(
                variable, scope.line(variable), "Assign parameters what no row has a part in.")
        same, parts = terms_of_new(
            variable, after, shard, statistics, takes_first, scope.line(variable), before
        )
        if same:
            assigned.same[i] = functools.reduce(tf.add, same)
        if parts:
            assigned.parts[i] = functools.reduce(tf.add, parts)
    return assigned


def without_rows(
    predictions: Sequence[tf.Tensor], facts: ShardFacts, *, is_alone: bool
) -> Assigned:
    """Finds the outputs without a batch axis, by index, and how the towers' values are merged.

    Args:
        predictions: the flattened outputs.
        facts: the facts about the traced tensors.
        is_alone: whether there is only one tower.

    Raises:
        ValueError: an output is neither a mean nor a sum over the batch's rows.
    """
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
                    f"example nor a mean or a sum over the examples: {reason}. Each tower has only "
                    "its own rows of the batch. Compute the output from towers.gather(rows), the "
                    "rows of all towers, with towers.make_parallel(model, gpus); or from each "
                    "example."
                )
            whole.parts[i] = part
    return whole


def terms_of_new(
    variable: Any, value: tf.Tensor, facts: ShardFacts, statistics: Collection[int],
    takes_first: bool, line: str, before: tf.Tensor | None = None,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Splits an assigned value into (terms that count once, this tower's summands of the rest).

    If towers disagree about a term that counts once, tower 0's is used.

    Args:
        variable, line: the variable that gets the value, and the user's line that assigns it.
        facts, statistics, takes_first: `shard` and the arguments after it of `what_becomes_of`.
        before: the old value, to which aggregation="sum" adds; None to ignore that aggregation.
    """
    is_statistic = id(variable) in statistics
    is_first = is_statistic and takes_first or variable.aggregation == "only_first_replica"
    if not facts.dependence.local(value) or is_seed(variable) or is_first:
        return [value], []
    if is_statistic:
        return [], [facts.weighted(value)]
    same, own = terms_of(value, facts)
    parts = list(map(facts.known_part, own))
    known = [part for part in parts if part is not None]
    if len(known) == len(own):
        return same, known
    if variable.aggregation == "sum" and before is not None:
        if not (len(same) == 1 and same[0] is before):
            raise _refused(variable, line, "Add to it, by assign_add, what the shard's rows add.")
        for term in own:
            fault = facts.rows.kind(term).fault
            if fault and not is_of_keras(fault.operation, "metrics"):
                facts.rows.check(term, f"what variable {variable.path!r} adds up")
        return same, [
            facts.masked(term) if part is None else part
            for term, part in zip(own, parts, strict=True)
        ]
    if variable.aggregation == "mean" and value.dtype.is_floating:
        facts.rows.check(value, f"what is assigned to variable {variable.path!r}")
        return [], [facts.weighted(value)]
    _warn_of_first(variable, line)
    return [value], []


def terms_of(
    value: tf.Tensor, facts: ShardFacts
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Splits a sum, or a multiple of one, into (terms that depend on no shard, terms that do)."""
    operation, is_local = value.op, facts.dependence.local
    if operation.type in _PASSED_ON:
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


def _warn_of_first(variable: Any, line: str) -> None:
    """Warns that only tower 0's value of this variable is kept."""
    warnings.warn(
        f"{line} assigns variable {variable.path!r} a value that it computes from a "
        "shard, so each tower has another value. Tower 0's value is kept. Make the variable with "
        'aggregation="mean" or "sum", or compute its value from towers.gather(rows) in a custom '
        "train_step.",
        stacklevel=2,
    )


def _refused(variable: Any, line: str, remedy: str) -> ValueError:
    return ValueError(
        f"{line} assigns variable {variable.path!r} a value that it computes from "
        f"a shard, so each tower has another value. {remedy} Or compute it from "
        "towers.gather(rows), the rows of all towers, with towers.make_parallel(model, gpus)."
    )
