"""Records collectives of a traced function: tensors that stand for one value of all towers.

    tower 0   value --+         +--> outputs   the same in all towers
    tower 1   value --+-- sum --+--> outputs
    ...               |         |
                      +<-- its gradient, backward, is the sum of the towers' gradients

Nothing is computed here: the function is traced once, for one tower, and run later.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.graph.dependence import Dependence
from towers.machine.user_lines import current_line


class TowerCollective(NamedTuple):
    """Describes how the towers' inputs become one value, for which the outputs stand.

    how: "sum" adds values, "rows" joins rows in the order of the batch, "join" concatenates any
        values, and "first" takes the values of tower 0.
    level: the level after which the collective runs. line: the user's line that makes it.
    spec: the spec of the ragged, sparse or dense rows whose components the inputs are, or None.
    """

    how: str
    inputs: list[tf.Tensor]
    level: int
    outputs: list[tf.Tensor]
    line: str
    spec: Any = None


class TowerCollectives:
    """Records the collectives of the function that is being traced.

    events: the collectives, in the order of the function.
    """

    def __init__(self, fed: Iterable[tf.Tensor]) -> None:
        """Args: fed: the function's symbolic arguments, whose values differ between towers."""
        self.dependence = Dependence()
        self.events: list[Any] = []
        self.graph = tf.compat.v1.get_default_graph()
        for tensor in fed:
            self.dependence.feed(tensor, local=True, level=0)

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums over the towers. Their gradient is the sum of the towers' gradients.

        The gradients add up, because each tower differentiates one part of the loss.
        """
        return self.add("sum", values, lambda *d: self.sum([tf.convert_to_tensor(v) for v in d]))

    def add(
        self, how: str, values: Sequence[tf.Tensor], backward: Callable | None = None,
        spec: Any = None,
    ) -> list[tf.Tensor]:
        """Adds a collective; returns symbolic tensors for its results.

        Args:
            how: "sum", "rows", "join" or "first". values: inputs. spec: the rows' spec, or None.
            backward: maps gradients of the results to gradients of the values.
        """
        self.check_outermost("makes towers meet")
        level = max(self.dependence.level(v) for v in values)

        def cross(*inputs: tf.Tensor) -> Any:
            outputs = [tf.identity(v) for v in inputs]
            return (outputs, backward) if backward else outputs

        outputs = list((tf.custom_gradient(cross) if backward else cross)(*values))
        line = current_line()
        self.events.append(TowerCollective(how, list(values), level, outputs, line, spec))
        for tensor in outputs:
            self.dependence.feed(tensor, local=False, level=level + 1)
        return outputs

    def is_outermost(self) -> bool:
        """Returns whether tracing is outside of conditions, loops and inner functions."""
        return tf.compat.v1.get_default_graph() is self.graph

    def check_outermost(self, what: str) -> None:
        """Raises ValueError, "LINE `what` ...", in a condition, a loop or an inner function."""
        if not self.is_outermost():
            raise ValueError(
                f"{current_line()} {what} inside of a tf.function, a tf.cond or a loop, where "
                "towers cannot meet. Take it out of there: drop the decorator, write the "
                "loop in Python, or compute the condition's values first and choose with tf.where."
            )
