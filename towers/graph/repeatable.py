"""Changes a traced graph so that its copies are bit-identical every time and on every device.

    AddN(a, b, c)          -->  AddN(AddN(a, b), c)    AddN begins with whichever buffer is free
    noise of tf.random     -->  other seeds in each tower's copy (otherwise all draw the same)
    a loop that draws it   -->  one iteration at a time (otherwise the order of draws varies)

The functions that a graph calls (branches, loops, a `tf.function`) are changed, too, and renamed,
because a function's name stands for one definition in the whole process.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from towers.machine.tensorflow_internals import read_instead
from towers.machine.user_lines import line_of

_SUMS = ("AddN", "AccumulateNV2")
# TensorFlow 2.21: of 45 CPU kernels, only these gave other bits in 40 concurrent calls.
_UNORDERED = ("CropAndResizeGradImage", "CropAndResizeGradBoxes")
_LOOPS = ("While", "StatelessWhile")
_SEED_STEP = 7919  # the difference between the seeds of two towers


def sums_in_order(graph: tf.Graph, results: Any) -> Any:
    """Makes a graph that is being traced add from left to right.

    Args:
        graph: the graph; functions that it calls stay as they are.
        results: a structure of the graph's tensors.

    Returns:
        `results`, where each sum is replaced by its new tensor.
    """
    sums: dict[str, tf.Tensor] = {}
    for operation in graph.get_operations():
        if operation.type in _SUMS and len(operation.inputs) > 2:
            first, *others = operation.inputs
            for value in others:
                first = tf.raw_ops.AddN(inputs=[first, value])
            (old,) = operation.outputs
            sums[old.name] = first
            read_instead(old, first)

    def replaced(value: Any) -> Any:
        return sums.get(value.name, value) if tf.is_symbolic_tensor(value) else value

    return tf.nest.map_structure(replaced, results, expand_composites=True) if sums else results


def is_repeatable(definition: tf.compat.v1.GraphDef) -> bool:
    """Returns whether a graph is repeatable after `sums_in_order`, without further changes.

    It must draw no noise. Functions that it calls must not draw noise or add three or more values.
    """
    has_sum = any(_is_sum(n) for f in definition.library.function for n in f.node_def)
    return not (has_sum or draws_noise(definition))


def warn_of_unordered_sums(graph: tf.Graph) -> None:
    """Warns of operations whose threads add to one sum in an arbitrary order."""
    for operation in graph.get_operations():
        if operation.type in _UNORDERED:
            warnings.warn(
                f"{line_of(operation)}: the gradient of tf.image.crop_and_resize adds in the order "
                "of its threads: its last bits differ from step to step. Take crops in the data "
                "pipeline, or give each operation one thread: python train.py --cpu_threads=1, or "
                "tf.config.threading.set_intra_op_parallelism_threads(1).",
                stacklevel=2,
            )


def has_unsaved_noise(definition: tf.compat.v1.GraphDef) -> bool:
    """Returns whether a graph, or a function in it, draws noise by tf.random, seeded or not."""
    return any("seed2" in node.attr for node in _nodes(definition))


def draws_noise(definition: tf.compat.v1.GraphDef) -> bool:
    """Returns whether copies of a graph, or of the functions in it, would draw equal noise."""
    return any(map(_draws, _nodes(definition)))


UNSAVED_NOISE = (
    "the model draws noise by tf.random, which has no state to save: after a resume its noise "
    "differs. Draw it with keras.random and a keras.random.SeedGenerator of the layer."
)


def repeatable(definition: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """Returns the graph with sums from left to right, and with loops that draw noise in order.

    Functions that the graph does not call are left out.
    """
    drawing = _callers(definition, _draws)

    def change(nodes: Any, output: str) -> bool:
        loops = [n for n in nodes if n.op in _LOOPS and drawing.intersection(_called(n))]
        for loop in loops:
            loop.attr["parallel_iterations"].i = 1
        return _order_sums(nodes, output) or bool(loops)

    return _changed(_without_uncalled(definition), change, "_repeatable")


def with_noise_of(definition: tf.compat.v1.GraphDef, tower: int) -> tf.compat.v1.GraphDef:
    """Returns the graph with the noise of one tower; tower 0 keeps the original seeds."""

    def change(nodes: Any, output: str) -> bool:
        del output
        drawing = [node for node in nodes if tower and _draws(node)]
        for node in drawing:
            node.attr["seed2"].i += tower * _SEED_STEP
        return bool(drawing)

    return _changed(definition, change, f"_tower_{tower}")


def _draws(node: Any) -> bool:
    """Returns whether an operation draws equal noise in every copy, because it has a seed."""
    return "seed2" in node.attr and bool(node.attr["seed"].i or node.attr["seed2"].i)


def _is_sum(node: Any) -> bool:
    return node.op in _SUMS and node.attr["N"].i > 2


def _order_sums(nodes: Any, output: str) -> bool:
    """Splits sums into sums of two; returns whether it did. `output`: a first output's suffix."""
    ordered: list[Any] = []
    for node in nodes:
        if _is_sum(node):
            left, *others = [name for name in node.input if not name.startswith("^")]
            control = [name for name in node.input if name.startswith("^")]
            for index, right in enumerate(others):
                is_last = index == len(others) - 1
                partial = type(node)()
                partial.CopyFrom(node)
                partial.op = "AddN"
                partial.name += "" if is_last else f"_partial_{index}"
                partial.input[:] = [left, right, *control]
                partial.attr["N"].i = 2
                partial.attr.pop("shape", None)  # an attribute of AccumulateNV2
                ordered.append(partial)
                left = partial.name + output.format("sum")
        else:
            ordered.append(node)
    is_changed = len(ordered) > len(nodes)
    if is_changed:
        copies = [type(node).FromString(node.SerializeToString()) for node in ordered]
        del nodes[:]
        nodes.extend(copies)
    return is_changed


# Functions that a graph calls.


def _changed(
    definition: tf.compat.v1.GraphDef, change: Callable[[Any, str], bool], suffix: str
) -> tf.compat.v1.GraphDef:
    """Returns a copy after calls of `change(nodes, output)` for the graph and for each function.

    Args:
        definition: the graph.
        change: changes nodes in place and returns whether it did. An operation's first output has
            the operation's name and the suffix `output`: "" in a graph, ":{}:0" in a function,
            where {} is the output's own name.
        suffix: added to the names of functions that were changed, or that call a changed one.
    """
    copy = tf.compat.v1.GraphDef()
    copy.CopyFrom(definition)
    change(copy.node, "")
    changed = {f.signature.name for f in copy.library.function if change(f.node_def, ":{}:0")}
    renamed = _callers(copy, lambda node: bool(changed.intersection(_called(node)))) | changed
    for function in copy.library.function:
        if function.signature.name in renamed:
            function.signature.name += suffix
    for node in _nodes(copy):
        for reference in _references(node):
            if reference.name in renamed:
                reference.name += suffix
    return copy


def _without_uncalled(definition: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    functions = {function.signature.name: function for function in definition.library.function}
    copy = tf.compat.v1.GraphDef(node=definition.node, versions=definition.versions)
    called: set[str] = set()
    new = {name for node in copy.node for name in _called(node)}
    while new:
        called |= new
        nodes = [node for name in new if name in functions for node in functions[name].node_def]
        new = {name for node in nodes for name in _called(node)} - called
    copy.library.function.extend(f for name, f in functions.items() if name in called)
    return copy


def _callers(definition: tf.compat.v1.GraphDef, is_meant: Callable[[Any], bool]) -> set[str]:
    """Returns the functions that hold a matching operation, directly or through other calls."""
    found: set[str] = set()
    while more := {
        f.signature.name for f in definition.library.function if f.signature.name not in found
        and any(is_meant(node) or found.intersection(_called(node)) for node in f.node_def)
    }:
        found |= more
    return found


def _called(node: Any) -> set[str]:
    return {reference.name for reference in _references(node)}


def _references(node: Any) -> Iterable[Any]:
    """Yields the attributes of an operation that name functions."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        yield from value.list.func


def _nodes(definition: tf.compat.v1.GraphDef) -> Iterator[Any]:
    """Yields the nodes of the graph, and of each function in its library."""
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def
