"""Cuts a traced function into levels: for each, one function of tensors.

    level 0   [towers]  forward, backward      -->  gradients
              ------- collective: their sum -------
    level 1   [home]    clipped gradients      -->  optimizer.apply
              ------- update -------
    level 2   [towers]  what reads the new weights ...

A function takes what the levels before it, collectives and reads have given, and gives what those
after it need.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from towers.graph.dependence import Dependence
from towers.graph.repeatable import draws_noise, repeatable, with_noise_of
from towers.graph.stage_levels import StageLevels
from towers.graph.walk import before
from towers.machine.tensorflow_internals import COLOCATION, KEEP_WHOLE, define_functions

# What must run although nobody reads its result; a condition may hold an assertion or a print.
_EFFECTS = ("Assert", "PrintV2", "If", "StatefulPartitionedCall")
_WHOLE = {"experimental_attributes": KEEP_WHOLE}

Levels: TypeAlias = Dependence | StageLevels


class Segment(NamedTuple):
    """One level of the function.

    inputs, outputs: the names of its arguments and results in the trace.
    function_of: tower index -> its function; one for all, or, with tf.random's noise, one for each.
    """

    inputs: list[str]
    outputs: list[str]
    function_of: Callable[[int], Callable]

    def call(self, values: Sequence[tf.Tensor], tower_index: int = 0) -> list[tf.Tensor]:
        """The results, in the order of `outputs`."""
        return self.function_of(tower_index)(*values) or []


class _Level(NamedTuple):
    """A level's results, and the operations that must run in it."""

    outputs: dict[str, tf.Tensor]
    effects: list[tf.Operation]


def cut(
    function: Any, dependence: Levels, wanted: Iterable[tf.Tensor], *,
    effects: Sequence[tf.Operation] = (), options: Mapping[str, Any] = _WHOLE,
) -> dict[int, Segment]:
    """The segments that compute `wanted`, by level; a level with nothing to do has none.

    Args:
        function: the traced function.
        dependence: the levels of its tensors.
        wanted: symbolic tensors of it.
        effects: operations that must run, too.
        options: of `tf.function`, for each segment.
    """
    levels: dict[int, _Level] = {}

    def want(tensor: tf.Tensor) -> None:
        if not dependence.is_fed(tensor):
            level = levels.setdefault(dependence.level(tensor), _Level({}, []))
            level.outputs[tensor.name] = tensor

    for tensor in wanted:
        want(tensor)
    for operation in effects:
        level = levels.setdefault(dependence.operation_level(operation), _Level({}, []))
        level.effects.append(operation)
    segments: dict[int, Segment] = {}
    graph = _Graph(function, options)
    for index in range(max(levels, default=-1), -1, -1):  # a level asks those before it for more
        if index in levels:
            inputs, operations = _reach(dependence, levels[index], index)
            for tensor in inputs:
                want(tensor)
            outputs = list(levels[index].outputs.values())
            segments[index] = graph.segment(inputs, outputs, operations)
    return segments


def captures(function: Any) -> list[tuple[Any, tf.Tensor]]:
    """(outside, inside) of all that a concrete function takes from outside."""
    outside = function.captured_inputs
    inside = function.inputs[len(function.inputs) - len(outside):]
    return list(zip(outside, inside, strict=True))


def effects_of(function: Any) -> list[tf.Operation]:
    """A concrete function's operations that must run although nobody reads them."""
    return [op for op in function.graph.control_outputs if op.type in _EFFECTS]


def _reach(
    dependence: Levels, level: _Level, index: int
) -> tuple[list[tf.Tensor], set[str]]:
    """Finds a level's inputs, and the names of its operations.

    It walks from the tensors: the operations of a loop get inputs when its gradient is taken.
    """
    inputs, operations = [], {op.name for op in level.effects}
    wanted = [*level.outputs.values(), *(v for op in level.effects for v in op.inputs)]

    def comes_from_outside(tensor: tf.Tensor) -> bool:
        is_before = dependence.level(tensor) < index and not dependence.is_anew(tensor)
        return dependence.is_fed(tensor) or is_before or tensor.op.type == "Placeholder"

    for tensor, is_input in before(wanted, comes_from_outside):
        if is_input:
            inputs.append(tensor)
        else:
            operations.add(tensor.op.name)
    return inputs, operations


class _Graph:
    """The traced graph, from which segments are copied."""

    def __init__(self, function: Any, options: Mapping[str, Any]) -> None:
        self._options = options
        self._definition = function.graph.as_graph_def()
        self._places = {node.name: i for i, node in enumerate(self._definition.node)}

    def segment(
        self, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], operations: set[str]
    ) -> Segment:
        """A function of the inputs that runs these operations."""
        graph = repeatable(self._part(operations))

        @functools.cache
        def make(tower: int) -> Callable:
            return _function(with_noise_of(graph, tower), inputs, outputs, self._options)

        has_noise = draws_noise(graph)
        return Segment(
            [v.name for v in inputs], [v.name for v in outputs],
            lambda tower: make(tower if has_noise else 0),
        )

    def _part(self, operations: set[str]) -> tf.compat.v1.GraphDef:
        """These operations, in the order of the trace, which asserts and prints keep."""
        part = tf.compat.v1.GraphDef(
            library=self._definition.library, versions=self._definition.versions
        )
        for place in sorted(self._places[name] for name in operations):
            node = self._definition.node[place]
            copy = part.node.add()
            copy.CopyFrom(node)
            kept = [i for i in node.input if not i.startswith("^") or i[1:] in operations]
            del copy.input[:]
            copy.input.extend(kept)
            copy.attr.pop(COLOCATION, None)  # operations that may not be here
        return part


def _function(
    graph: tf.compat.v1.GraphDef, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor],
    options: Mapping[str, Any],
) -> Callable:
    """The graph as a concrete function without a device: it follows its caller's."""

    def level(*values: tf.Tensor) -> list[tf.Tensor]:
        copies = tf.graph_util.import_graph_def(
            graph, input_map=dict(zip([v.name for v in inputs], values, strict=True)),
            return_elements=[v.name for v in outputs], name="",
        )
        for copy, tensor in zip(copies or [], outputs, strict=True):
            copy.set_shape(tensor.shape)  # importing forgets it
        return copies

    define_functions(graph)
    with tf.device(None):
        return tf.function(level, autograph=False, **options).get_concrete_function(
            *(tf.TensorSpec(v.shape, v.dtype) for v in inputs)
        )
