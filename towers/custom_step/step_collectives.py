"""Records collectives of a custom step: tensors that stand for one value of all towers.

The gradient of such a tensor, backward, is the sum of the towers' gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from towers.graph.cut import TowerCollectives
from towers.graph.facts import COUNT, Fact
from towers.graph.rows import Rows
from towers.machine.loss_internals import marked, marks_of
from towers.machine.user_lines import current_line
from towers.step.loss_kinds import ShardFacts
from towers.step.sharding import batch_size
from towers.step.structures import any_rows, components, packed, take_rows


@dataclass
class Update:
    """Records a call of `optimizer.apply`, which runs once, on the parameter device.

    assigned: (variable, value) pairs that the step assigned to its variables before.
    reads: (tensor, variable) pairs of the reads of its variables after it.
    """

    optimizer: keras.optimizers.Optimizer
    gradients: list[Any]
    variables: list[keras.Variable]
    assigned: list[tuple[keras.Variable, tf.Tensor]]
    level: int
    reads: list[tuple[tf.Tensor, keras.Variable]] = field(default_factory=list)


class StepCollectives(TowerCollectives):
    """Records the collectives of the custom step that is being traced, and its `updates`, in order.

    facts: the facts on the shard's tensors.
    """

    def __init__(self, shard: Sequence[Any], share: tf.Tensor, begin: tf.Tensor) -> None:
        """
        shard: symbolic tensors [max(n, 1), ...], dense, ragged or sparse.
        share: scalar float64, n / N; 0 where one row stands for an empty shard.
        begin: scalar int32, the index of the shard's first row in the global batch.
        """
        super().__init__([*components(shard), share, begin])
        rows = Rows.of_shard(
            shard, is_shared=lambda v: v.graph is self.graph and self.dependence.is_fed(v)
        )
        rows.declare(share, COUNT)
        rows.declare(begin, Fact(degree=None))
        self.facts = ShardFacts(self.dependence, rows, share)
        self.updates: list[Update] = []
        self._num_rows, self._begin = batch_size(shard), begin

    def first(self, value: tf.Tensor) -> tf.Tensor:
        """Returns tower 0's value; the value itself if all towers have it."""
        return self.add("first", [value])[0] if self.dependence.local(value) else value

    def gather_marked(self, rows: Any) -> Any:
        """Implements `towers.gather`: returns all towers' rows, with their masks and logits."""
        gathered = self.gather(rows)
        if gathered is rows or not isinstance(rows, tf.Tensor):
            return gathered
        return marked(gathered, {name: self.gather(v) for name, v in marks_of(rows).items()})

    def gather(self, rows: Any) -> Any:
        """Returns the rows of all towers, or a tensor that depends on no shard as it is."""
        if not self.dependence.local(rows):
            return rows
        if not has_rows(rows):
            raise ValueError(
                f"towers.gather, {current_line()}: a tensor of shape {rows.shape} has no batch "
                "axis. Gather what has one row for each example, and reduce it after that."
            )
        tensors, spec = components([rows]), any_rows(rows)
        floats = [v.dtype.is_floating for v in tensors]

        def backward(*gradients: Any) -> list[Any]:
            """Returns the tower's part of the gradients; None for tensors that are not floats."""
            of_floats = [tf.convert_to_tensor(g) for g, f in zip(gradients, floats) if f]
            totals = iter(self.sum(of_floats))
            whole = packed(spec, iter([next(totals) if f else v for v, f in zip(joined, floats)]))
            # The tower's rows, or any row if its shard is empty.
            begin = tf.minimum(self._begin, batch_size([whole]) - self._num_rows)
            own = components([take_rows(whole, [begin], [begin + self._num_rows])])
            return [self.facts.masked(v) if f else None for v, f in zip(own, floats)]

        joined = self.add("rows", tensors, backward if rows.dtype.is_floating else None, spec=spec)
        return packed(spec, iter(joined))

    def of_batch(self, value: Any, what: str) -> Any:
        """Combines the towers' values into one value of the global batch.

        Rows are gathered. Sums over rows add up, and other values weigh n_i / N. Anything but a
        tensor is returned unchanged. `what` describes the value in warnings, and in the ValueError
        that integers raise.
        """
        if isinstance(value, keras.Variable):
            value = tf.convert_to_tensor(value)
        if not tf.is_tensor(value) or not self.dependence.local(value):
            return value
        check_rank(value, what)
        if has_rows(value):
            self.facts.rows.check(value, what)
            return self.gather(value)
        if not value.dtype.is_floating:
            raise ValueError(
                f"{what} is a {value.dtype.name} that every tower computes from its shard, and not "
                "a mean. Cast it to float and take its mean over the examples, or compute it from "
                "towers.gather(rows)."
            )
        return self.sum([self.facts.part(value, what)])[0]


def check_rank(tensor: tf.Tensor, what: str) -> None:
    """Raises ValueError, "`what` has ...", if a tensor, such as of tf.py_function, has no rank."""
    if tensor.shape.rank is None:
        raise ValueError(
            f"{what} has a shape that TensorFlow does not know, so that towers cannot tell rows "
            "from a mean. Say it: tf.ensure_shape(value, []) of a number, "
            "tf.ensure_shape(value, [None, 3]) of rows."
        )


def has_rows(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor has a batch axis: a first dimension that the trace left open."""
    shape = tensor.shape
    return shape.rank is None or shape.rank > 0 and shape[0] is None
