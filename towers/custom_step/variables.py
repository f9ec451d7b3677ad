"""Records the assignments to variables of Keras and TensorFlow while a step is traced.

The table in towers/step/assigned.py says how the towers' values become one: at the next update, at
the end of the step or, for a metric, when the step reads it again. A parameter follows the rules of
other variables, because no automatic update comes later.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from towers.custom_step.step_collectives import StepCollectives, Update
from towers.machine.user_lines import current_line
from towers.step.assigned import terms_of, terms_of_new
from towers.step.raw_variables import read_as_they_are, variable_behind
from towers.step.state import is_seed


class VariableScope(keras.StatelessScope):
    """Gives Keras' variables their values in a traced step, and records reads and assignments.

    reads: (tensor, variable) pairs that the step reads before any update of the variable.
    is_unready: whether the step used variables that do not exist yet.
    """

    def __init__(
        self, collectives: StepCollectives, parameter_device: str,
        statistics: Iterable[keras.Variable], takes_first: bool,
    ) -> None:
        """
        parameter_device: the device for variables that the step creates.
        statistics: the variables of BatchNormalization, averaged over the towers, or tower 0's if
            it `takes_first`.
        """
        super().__init__(collect_losses=True, initialize_variables=False)
        self.reads: list[tuple[tf.Tensor, keras.Variable]] = []
        self.is_unready = False
        self._collectives, self._parameter_device = collectives, parameter_device
        self._statistics, self._takes_first = set(map(id, statistics)), takes_first
        # By the id of a variable:
        self._assigned: dict[int, tuple[keras.Variable, str]] = {}  # and the assigning line
        self._latest: dict[int, Update] = {}
        # Metrics that were assigned and not read since, with their values before.
        self._metrics: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self._metric_reads: dict[int, tf.Tensor] = {}

    # Methods that Keras calls.

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value that the step reads; None if the variable does not exist yet."""
        if variable_behind(variable) is None:
            self.is_unready = True
            return None
        if id(variable) in self._metrics and not self.is_unready:
            self._merge_metrics()
        assigned = self.state_mapping.get(id(variable))
        if assigned is None:
            known = self._metric_reads.get(id(variable))
            return self._read(variable) if known is None else known
        if variable.aggregation == "sum":
            return assigned
        if not variable.trainable:
            return tf.stop_gradient(assigned)
        # The new value has the gradient of the parameter, whose read tapes recognize.
        read = self._read(variable)
        value = tf.stop_gradient(assigned) + (read - tf.stop_gradient(read))
        value.handle = read.handle
        return value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Records a value that the step assigns."""
        variable, _ = update
        self._collectives.check_outermost(f"assigns {variable.path}")
        if variable_behind(variable) is None:
            self.is_unready = True
        elif variable.aggregation == "sum" and id(variable) not in self._metrics:
            self._metrics[id(variable)] = variable, self.get_current_value(variable)
        self._assigned[id(variable)] = variable, current_line()
        super().add_update(update)

    # Methods that the trace calls.

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leaves the scope for a `with` block: Keras creates variables at once, in no graph."""
        self.__exit__()
        try:
            with tf.init_scope(), tf.device(self._parameter_device):
                self.make_variables()
                yield
        finally:
            self.__enter__()

    def make_variables(self) -> None:
        """Creates the deferred variables, as Keras does when the outermost scope ends."""
        with tf.init_scope(), tf.device(self._parameter_device), keras.StatelessScope():
            pass

    def take_assigned(
        self, variables: Iterable[keras.Variable]
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Removes and returns the values that the step has assigned to these variables so far."""
        taken = [(v, None) for v in variables if id(v) in self.state_mapping]
        merged = self._merge(taken)
        for variable, _ in taken:
            del self.state_mapping[id(variable)]
        return [(variable, value) for (variable, _), value in zip(taken, merged, strict=True)]

    def take_all_assigned(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Removes and returns all values that the step has assigned; call it at the end."""
        if self.is_unready:
            return []
        self._merge_metrics()
        return self.take_assigned([variable for variable, _ in self._assigned.values()])

    def updated(self, update: Update) -> None:
        """Makes later reads of an update's variables read their values after the update."""
        for variable in [*update.variables, *update.optimizer.variables]:
            self._latest[id(variable)] = update

    # Implementation.

    def _read(self, variable: keras.Variable) -> tf.Tensor:
        stored: Any = variable_behind(variable)
        with self._collectives.graph.as_default(), read_as_they_are():
            read = tf.convert_to_tensor(stored)
        read.handle = stored.handle  # tapes recognize the variable by it
        update = self._latest.get(id(variable))
        (update.reads if update else self.reads).append((read, variable))
        if variable.aggregation == "sum":
            self._metric_reads[id(variable)] = read
        level = update.level + 1 if update else 0
        self._collectives.dependence.feed(read, local=is_seed(variable), level=level)
        return read

    def _merge_metrics(self) -> None:
        metrics, self._metrics = self._metrics, {}
        for key, value in zip(metrics, self._merge(metrics.values()), strict=True):
            self.state_mapping[key] = tf.stop_gradient(value)

    def _merge(
        self, assigned: Iterable[tuple[keras.Variable, tf.Tensor | None]]
    ) -> list[tf.Tensor]:
        """Merges the values that towers have assigned to variables, by one collective for all sums.

        With each variable comes the value to which a metric adds, or None.
        """
        collectives, facts, split = self._collectives, self._collectives.facts, []
        for variable, before in assigned:
            value, (_, line) = self.state_mapping[id(variable)], self._assigned[id(variable)]
            if before is not None:
                (before,), _ = terms_of(before, facts)  # the term that `terms_of_new` will find
            same, parts = terms_of_new(
                variable, value, facts, self._statistics, self._takes_first, line, before
            )
            if before is not None and parts:  # as Keras does, add up x before it is added to old
                parts = [functools.reduce(tf.add, parts)]
            split.append((same, parts))
        sums = iter(collectives.sum([part for _, parts in split for part in parts]))
        return [
            functools.reduce(tf.add, [*map(collectives.first, same), *(next(sums) for _ in parts)])
            for same, parts in split
        ]
