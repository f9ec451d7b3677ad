"""Cuts a traced function into levels and makes one function of tensors for each level.

    level 0   [towers]  forward, backward      -->  gradients
              ------- collective: their sum -------
    level 1   [home]    clipped gradients      -->  optimizer.apply
              ------- update -------
    level 2   [towers]  operations that read the new weights ...

A function takes results of earlier levels, of collectives and of reads. It returns the tensors that
later levels need. [home] is the parameter device. Nothing is computed here.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.graph.levels import Dependence
from towers.graph.repeatable import draws_noise, is_ordered, repeatable
from towers.graph.walk import before
from towers.machine.tensorflow_internals import COLOCATION, KEEP_WHOLE, define_functions
from towers.machine.user_lines import current_line


class TowerCollective(NamedTuple):
    """Describes how the towers' inputs become one value, for which the outputs stand.

    how: "sum" adds values, "rows" joins rows in the order of the batch, "join" concatenates any
        values, and "first" takes the values of tower 0.
    level: the level after which the collective runs. line: the user's line that makes it.
    spec: the spec of the ragged, sparse or dense rows that the inputs are components of.
    """

    how: str
    inputs: list[tf.Tensor]
    level: int
    outputs: list[tf.Tensor]
    line: str
    spec: Any = None


class TowerCollectives:
    """Records the collectives of the function that is being traced, in order, in `events`."""

    def __init__(self, arguments: Iterable[tf.Tensor]) -> None:
        self.dependence = Dependence(arguments)
        self.events: list[TowerCollective] = []
        self.graph = tf.compat.v1.get_default_graph()

    def sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums over the towers; gradients add up, each of one part of the loss."""
        if not values:
            return []
        return self.add("sum", values, lambda *d: self.sum([tf.convert_to_tensor(v) for v in d]))

    def add(
        self, how: str, values: Sequence[tf.Tensor], backward: Callable | None = None,
        spec: Any = None,
    ) -> list[tf.Tensor]:
        """Adds a `TowerCollective`; returns its outputs.

        `backward` maps gradients of the outputs to gradients of the values.
        """
        self.check_outermost("makes towers meet")
        level = max(map(self.dependence.level, values))

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


# These must run even if their results are unused: a condition may hold an assertion or a print.
_EFFECTS = ("Assert", "PrintV2", "If", "StatefulPartitionedCall")
_WHOLE = {"experimental_attributes": KEEP_WHOLE}


class Segment(NamedTuple):
    """Holds one level of the function: the names of its arguments and results in the trace.

    function_of: maps a tower's index to its function; functions differ by noise of tf.random.
    is_ordered: whether its calls run in the order of the towers.
    """

    inputs: list[str]
    outputs: list[str]
    function_of: Callable[[int], Callable]
    is_ordered: bool


def cut(
    function: Any, dependence: Dependence, wanted: Iterable[tf.Tensor], *,
    with_effects: bool = True, options: Mapping[str, Any] = _WHOLE,
) -> dict[int, Segment]:
    """Returns the segments of a traced function that compute `wanted`, by level.

    An empty level has no segment. Assertions and prints also run `with_effects`. `options` of
    `tf.function` apply to each segment.
    """
    definition = function.graph.as_graph_def()
    places = {node.name: i for i, node in enumerate(definition.node)}
    outputs: dict[int, dict[str, tf.Tensor]] = defaultdict(dict)  # by level
    must_run: dict[int, list[tf.Operation]] = defaultdict(list)
    waiting = list(wanted)
    for operation in function.graph.control_outputs if with_effects else ():
        if operation.type in _EFFECTS:
            must_run[dependence.operation_level(operation)].append(operation)
    segments: dict[int, Segment] = {}
    last = max([*map(dependence.level, waiting), *must_run], default=-1)
    for index in range(last, -1, -1):  # a level adds to what earlier ones return
        for tensor in waiting:
            if not dependence.is_fed(tensor):
                outputs[dependence.level(tensor)][tensor.name] = tensor
        if index in outputs or index in must_run:
            results = list(outputs[index].values())
            waiting, operations = _reach(dependence, index, results, must_run[index])
            part = tf.compat.v1.GraphDef(  # in the order of the trace, as assert and print need
                node=[definition.node[i] for i in sorted(places[name] for name in operations)],
                library=definition.library, versions=definition.versions,
            )
            for node in part.node:
                node.input[:] = [
                    i for i in node.input if not i.startswith("^") or i[1:] in operations
                ]
                node.attr.pop(COLOCATION, None)  # it names operations that may be left out
            segments[index] = _segment(part, waiting, results, options)
    return segments


def _reach(
    dependence: Dependence, index: int, results: list[tf.Tensor], must_run: list[tf.Operation]
) -> tuple[list[tf.Tensor], set[str]]:
    """Finds the inputs of a level and the names of its operations.

    It follows inputs, not the order of creation: taking a loop's gradient adds inputs to the loop.
    """

    def comes_from_outside(tensor: tf.Tensor) -> bool:
        is_before = dependence.level(tensor) < index and not dependence.is_recomputed(tensor)
        return dependence.is_fed(tensor) or is_before or tensor.op.type == "Placeholder"

    ends = [*results, *(v for operation in must_run for v in operation.inputs)]
    reached = list(before(ends, comes_from_outside))
    operations = {v.op.name for v, is_input in reached if not is_input}
    operations.update(operation.name for operation in must_run)
    return [v for v, is_input in reached if is_input], operations


def _segment(
    graph: tf.compat.v1.GraphDef, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor],
    options: Mapping[str, Any],
) -> Segment:
    """Makes concrete functions of a graph, without a device: they run on their caller's device."""
    input_names, output_names = [v.name for v in inputs], [v.name for v in outputs]
    has_noise, ordered = draws_noise(graph), is_ordered(graph)

    @functools.cache
    def make(tower: int) -> Callable:
        definition = repeatable(graph, tower)

        def level(*values: tf.Tensor) -> list[tf.Tensor]:
            copies = tf.graph_util.import_graph_def(
                definition, input_map=dict(zip(input_names, values, strict=True)),
                return_elements=output_names, name="",
            ) or []
            for copy, tensor in zip(copies, outputs, strict=True):
                copy.set_shape(tensor.shape)  # the import loses it
            return copies

        define_functions(definition)
        with tf.device(None):
            return tf.function(level, autograph=False, **options).get_concrete_function(
                *(tf.TensorSpec(v.shape, v.dtype) for v in inputs)
            )

    return Segment(input_names, output_names, lambda t: make(t if has_noise else 0), ordered)
