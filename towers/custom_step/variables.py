"""Records the assignments to variables of Keras and TensorFlow while a step is traced.

The table in towers/step/assigned.py says how the towers' values become one. Two rows differ,
because a custom step may read a variable after it was assigned:

    a metric       old + x becomes old + the sum of all x when the step reads it again. Any other
                   value that depends on a shard raises ValueError.
    a parameter    follows the rules of other variables, because no automatic update comes later.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine.user_lines import current_line, is_of_keras
from towers.custom_step.step_collectives import StepCollectives, Update
from towers.step.assigned import terms_of_new
from towers.step.raw_variables import read_as_they_are, variable_behind
from towers.step.state import is_seed


class _Metric(NamedTuple):
    """Holds a metric's variable that was assigned and not read since.

    before: its value before the assignment. added: the value that a shard adds to it, or None if
        the assigned value is equal in all towers.
    """

    variable: keras.Variable
    before: tf.Tensor
    added: tf.Tensor | None


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
        Args:
            collectives: the collectives of the trace.
            parameter_device: the device for variables that the step creates.
            statistics: the variables of BatchNormalization, which are averaged over the towers.
            takes_first: whether to take tower 0's statistics instead.
        """
        super().__init__(collect_losses=True, initialize_variables=False)
        self.reads: list[tuple[tf.Tensor, keras.Variable]] = []
        self.is_unready = False
        self._collectives, self._parameter_device = collectives, parameter_device
        self._statistics, self._takes_first = set(map(id, statistics)), takes_first
        # By the id of a variable:
        self._assigned: dict[int, tuple[keras.Variable, str]] = {}  # and the assigning line
        self._latest: dict[int, Update] = {}
        self._metrics: dict[int, _Metric] = {}
        self._metric_reads: dict[int, tf.Tensor] = {}

    # Methods that Keras calls.

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value that the step reads; None if the variable does not exist yet."""
        if variable_behind(variable) is None:
            self.is_unready = True
            return None
        if id(variable) in self._metrics:
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
        variable, value = update
        self._collectives.check_outermost(f"assigns {variable.path}")
        if variable_behind(variable) is None:
            self.is_unready = True
        elif variable.aggregation == "sum" and not self.is_unready:
            known = self._metrics.get(id(variable))
            before = self.get_current_value(variable) if known is None else known.before
            is_local = self._collectives.dependence.local(value)
            added = _added(variable, before, value) if is_local else None
            self._metrics[id(variable)] = _Metric(variable, before, added)
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
        return [
            (v, self._merged(v, self.state_mapping.pop(id(v))))
            for v in variables
            if id(v) in self.state_mapping
        ]

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
        with self._outermost(), read_as_they_are():
            read = tf.convert_to_tensor(stored)
        read.handle = stored.handle  # tapes recognize the variable by it
        update = self._latest.get(id(variable))
        (update.reads if update else self.reads).append((read, variable))
        if variable.aggregation == "sum":
            self._metric_reads[id(variable)] = read
        level = update.level + 1 if update else 0
        self._collectives.dependence.feed(read, local=is_seed(variable), level=level)
        return read

    def _outermost(self) -> AbstractContextManager:
        """Enters the graph of the step, also from the graph of a loop or an inner function."""
        is_outermost = self._collectives.is_outermost()
        return nullcontext() if is_outermost else self._collectives.graph.as_default()

    def _merge_metrics(self) -> None:
        """Sets metrics to old + the sum of all towers' x, in one collective for all metrics."""
        if self.is_unready:
            return
        metrics, self._metrics = self._metrics, {}
        parts = [self._part(m.variable, m.added) for m in metrics.values() if m.added is not None]
        sums = iter(self._collectives.sum(parts) if parts else [])
        for key, metric in metrics.items():
            is_local = metric.added is not None
            value = metric.before + next(sums) if is_local else self.state_mapping[key]
            self.state_mapping[key] = tf.stop_gradient(value)

    def _part(self, variable: keras.Variable, added: tf.Tensor) -> tf.Tensor:
        """Returns a shard's part of a metric's addend: Keras' metrics add sums, others may not."""
        facts = self._collectives.facts
        kind = facts.rows.kind(added)
        if kind.fault and not is_of_keras(kind.fault.operation, "metrics"):
            facts.rows.check(added, f"what metric variable {variable.path!r} adds")
        is_mean = kind.name == "mean" and added.dtype.is_floating
        return facts.weighted(added) if is_mean else facts.masked(added)

    def _merged(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        """Combines the values that towers have assigned into one."""
        collectives, (_, line) = self._collectives, self._assigned[id(variable)]
        same, parts = terms_of_new(
            variable, value, collectives.facts, self._statistics, self._takes_first, line
        )
        same = [
            collectives.add("first", [v])[0] if collectives.dependence.local(v) else v
            for v in same
        ]
        return functools.reduce(tf.add, [*same, *(collectives.sum(parts) if parts else [])])


def _added(variable: keras.Variable, before: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns x of a metric that is assigned old + x: subtracting old would round it."""
    operation = value.op
    if operation.type == "AddV2" and operation.inputs[0] is before:
        return operation.inputs[1]
    raise ValueError(
        f"{current_line()}: metric variable {variable.path!r} is assigned something of a shard "
        "that is not added to it, and the towers' values of it make no sum. Compute it of "
        "towers.gather(rows), the rows of all towers."
    )
