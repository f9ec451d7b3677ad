"""Collectives of a traced step: tensors that stand for one value of all towers.

    tower 0   value --+                  +--> outputs   the same in all towers
    tower 1   value --+-- sum, or rows --+--> outputs
    ...               |                  |
                      +<-- its gradient, backward, is the sum of the towers' gradients

Beside `levels.tower_collectives`' sums: rows, joined values, tower 0's, means; and optimizers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from towers.graph.tower_collectives import TowerCollectives
from towers.machine.loss_internals import marked, marks_of
from towers.machine.user_lines import current_line
from towers.graph.facts import COUNT, Fact
from towers.graph.rows import Rows
from towers.step.gathering import gathered_by
from towers.step.sharding import batch_size
from towers.step.structures import any_rows, components, packed
from towers.step.tensor_rows import take_rows


@dataclass
class Update:
    """A call of `optimizer.apply`, once, at home.

    assigned: (variable, value) of what the step gave these variables before.
    reads: (tensor, variable) of what is read after it.
    """

    optimizer: keras.optimizers.Optimizer
    gradients: list[Any]
    variables: list[keras.Variable]
    assigned: list[tuple[keras.Variable, tf.Tensor]]
    level: int
    reads: list[tuple[tf.Tensor, keras.Variable]] = field(default_factory=list)


_TRACING: ContextVar = ContextVar("tracing", default=False)


class StepCollectives(TowerCollectives):
    """The collectives of the step that is being traced; it knows its shard.

    events: collectives and updates, in the order of the step.
    rows: what tensors are to the shard's.
    """

    def __init__(
        self, shard: Sequence[Any], share: tf.Tensor, begin: tf.Tensor
    ) -> None:
        """
        Args:
            shard: symbolic tensors [max(n, 1), ...] of any kind.
            share: scalar float64, n / N; 0 where one row stands for an empty shard.
            begin: scalar int32, the index of the shard's first row in the global batch.
        """
        super().__init__([*components(shard), share, begin])
        self.is_real = share > 0
        self._num_rows = batch_size(shard)
        self._share, self._begin = share, begin
        self.rows = Rows.of_shard(
            shard, is_shared=lambda v: v.graph is self.graph and self.dependence.is_fed(v)
        )
        self.rows.declare(share, COUNT)
        self.rows.declare(begin, Fact(degree=None))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within, `towers.gather` gathers here."""
        token = _TRACING.set(True)
        try:
            with gathered_by(self.gather_marked):
                yield
        finally:
            _TRACING.reset(token)

    @staticmethod
    @contextmanager
    def paused() -> Iterator[None]:
        """Within, nothing meets: for a trial of what the user wrote, outside of the trace."""
        token = _TRACING.set(False)
        try:
            with gathered_by(None):
                yield
        finally:
            _TRACING.reset(token)

    @staticmethod
    def are_current() -> bool:
        """Whether the calling thread is tracing a step: others see Keras and TensorFlow as is."""
        return _TRACING.get()

    # The ways to meet.

    def gather_marked(self, rows: Any) -> Any:
        """Implements `towers.gather`: the rows of all towers, with their masks and logits.

        Args: rows: a tensor of any kind.
        """
        gathered = self.gather(rows)
        if gathered is rows or not isinstance(rows, tf.Tensor):
            return gathered
        return marked(gathered, {name: self.gather(v) for name, v in marks_of(rows).items()})

    def gather(self, rows: Any) -> Any:
        """The rows of all towers; a tensor that does not depend on a shard is returned as it is."""
        tensors = components([rows])
        if not any(self.dependence.local(v) for v in tensors):
            return rows
        if not has_rows(rows):
            raise ValueError(
                f"towers.gather, {current_line()}: a tensor of shape {rows.shape} has no batch "
                "axis. Gather what has one row for each example, and reduce it after that."
            )
        spec = any_rows(rows)
        if not rows.dtype.is_floating:
            joined = self.add("rows", tensors, spec=spec)
            return packed(spec, iter(joined))

        def backward(*gradients: Any) -> list[Any]:
            """The tower's own part of the gradient of each tensor of floats."""
            floats = [v.dtype.is_floating for v in tensors]
            totals = iter(self.total([g for g, f in zip(gradients, floats) if f]))
            given = iter([next(totals) if f else v for v, f in zip(joined, floats)])
            own = components([self._own(packed(spec, given))])
            return [v if f else None for v, f in zip(own, floats)]

        joined = self.add("rows", tensors, backward, spec=spec)
        return packed(spec, iter(joined))

    def join(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The towers' values one after another, of empty shards too."""
        return self.add("join", list(values))

    def first(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Tower 0's values."""
        return self.add("first", list(values))

    def of_batch(self, value: Any, what: str) -> Any:
        """Joins the towers' values into one of the global batch.

        Rows are joined; else see `part`.

        Args:
            value: a tensor; all else is handed back.
            what: it is, for the message of the ValueError that integers raise.
        """
        if isinstance(value, keras.Variable):
            value = tf.convert_to_tensor(value)
        if not tf.is_tensor(value) or not self.dependence.local(value):
            return value
        check_rank(value, what)
        if has_rows(value):
            self.rows.check(value, what)
            return self.gather(value)
        if not value.dtype.is_floating:
            raise ValueError(
                f"{what} is a {value.dtype.name} that every tower computes of its own shard, and "
                "no mean. Cast it to float and take its mean over the examples, or compute it of "
                "towers.gather(rows)."
            )
        return self.sum([self.part(value, what)])[0]

    def part(self, value: tf.Tensor, what: str) -> tf.Tensor:
        """A shard's part of the batch's value, to which the towers' parts add up.

        A sum over rows is that; anything else is taken for a mean over the examples.

        Args:
            value: of a shard, without a batch axis.
            what: it is, for the warning where it is neither.
        """
        is_sum = self.rows.check(value, what).name == "sum"
        return self.masked(value) if is_sum else self.weighted(value)

    def weighted(self, value: tf.Tensor) -> tf.Tensor:
        """value * n / N."""
        return value * tf.cast(self._share, value.dtype)

    def weighted_if_real(self, value: tf.Tensor) -> tf.Tensor:
        """value * n / N; of an empty shard's row the value itself, as zeros that the step
        divides by would become NaN."""
        return value * tf.cast(tf.where(self.is_real, self._share, 1), value.dtype)

    def masked(self, value: tf.Tensor) -> tf.Tensor:
        """The value, or zeros of an empty shard."""
        return tf.where(self.is_real, value, tf.zeros_like(value))

    def _own(self, rows: Any) -> Any:
        """A tower's own rows of [N, ...]; zeros where its shard is empty."""
        begin = tf.minimum(self._begin, batch_size([rows]) - self._num_rows)
        own = take_rows(rows, [begin], [begin + self._num_rows])
        return tf.nest.map_structure(
            lambda v: self.masked(v) if v.dtype.is_floating else v, own, expand_composites=True
        )


def check_rank(tensor: tf.Tensor, what: str) -> None:
    """Raises ValueError where the trace does not know whether a tensor has a batch axis.

    Args:
        tensor: such as what tf.py_function returns.
        what: it is.
    """
    if tensor.shape.rank is None:
        raise ValueError(
            f"{what} has a shape that TensorFlow does not know, so that towers cannot tell rows "
            "from a mean. Say it: tf.ensure_shape(value, []) of a number, "
            "tf.ensure_shape(value, [None, 3]) of rows."
        )


def has_rows(tensor: tf.Tensor) -> bool:
    """Whether a tensor has a batch axis: a first dimension that the trace left open."""
    shape = tensor.shape
    return shape.rank is None or shape.rank > 0 and shape[0] is None
