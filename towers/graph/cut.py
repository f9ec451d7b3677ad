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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    definition = function.graph.as_graph_def()
    outputs: dict[int, dict[str, tf.Tensor]] = defaultdict(dict)  # by level
    must_run: dict[int, list[tf.Operation]] = defaultdict(list)
    waiting = list(wanted)
    for operation in effects:
        must_run[dependence.operation_level(operation)].append(operation)
    segments: dict[int, Segment] = {}
    last = max([*map(dependence.level, waiting), *must_run], default=-1)
    for index in range(last, -1, -1):  # a level asks those before it for more
        for tensor in waiting:
            if not dependence.is_fed(tensor):
                outputs[dependence.level(tensor)][tensor.name] = tensor
        if index in outputs or index in must_run:
            results = list(outputs[index].values())
            waiting, operations = _reach(dependence, index, results, must_run[index])
            part = repeatable(_part(definition, operations))
            segments[index] = _segment(part, waiting, results, options)
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
    dependence: Levels, index: int, results: Iterable[tf.Tensor], must_run: Sequence[tf.Operation]
) -> tuple[list[tf.Tensor], set[str]]:
    """Finds a level's inputs, and the names of its operations.

    It walks from the tensors: the operations of a loop get inputs when its gradient is taken.
    """
    inputs, operations = [], {operation.name for operation in must_run}

    def comes_from_outside(tensor: tf.Tensor) -> bool:
        is_before = dependence.level(tensor) < index and not dependence.is_anew(tensor)
        return dependence.is_fed(tensor) or is_before or tensor.op.type == "Placeholder"

    ends = [*results, *(v for operation in must_run for v in operation.inputs)]
    for tensor, is_input in before(ends, comes_from_outside):
        if is_input:
            inputs.append(tensor)
        else:
            operations.add(tensor.op.name)
    return inputs, operations


def _part(
    definition: tf.compat.v1.GraphDef, operations: Collection[str]
) -> tf.compat.v1.GraphDef:
    """These operations of a graph, in the order of the trace, which asserts and prints keep."""
    part = tf.compat.v1.GraphDef(
        node=[node for node in definition.node if node.name in operations],
        library=definition.library, versions=definition.versions,
    )
    for node in part.node:
        node.input[:] = [i for i in node.input if not i.startswith("^") or i[1:] in operations]
        node.attr.pop(COLOCATION, None)  # operations that may not be here
    return part


def _segment(
    graph: tf.compat.v1.GraphDef, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor],
    options: Mapping[str, Any],
) -> Segment:
    """The graph as concrete functions without a device: they follow their caller's."""
    input_names, output_names = [v.name for v in inputs], [v.name for v in outputs]
    has_noise = draws_noise(graph)

    @functools.cache
    def make(tower: int) -> Callable:
        noisy = with_noise_of(graph, tower)

        def level(*values: tf.Tensor) -> list[tf.Tensor]:
            copies = tf.graph_util.import_graph_def(
                noisy, input_map=dict(zip(input_names, values, strict=True)),
                return_elements=output_names, name="",
            )
            for copy, tensor in zip(copies or [], outputs, strict=True):
                copy.set_shape(tensor.shape)  # importing forgets it
            return copies

        define_functions(noisy)
        with tf.device(None):
            return tf.function(level, autograph=False, **options).get_concrete_function(
                *(tf.TensorSpec(v.shape, v.dtype) for v in inputs)
            )

    return Segment(input_names, output_names, lambda tower: make(tower if has_noise else 0))
