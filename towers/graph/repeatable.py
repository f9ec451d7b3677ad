"""Changes a traced graph so that its copies are bit-identical every time and on every device.

    AddN(a, b, c)          -->  AddN(AddN(a, b), c)    AddN begins with whichever buffer is free
    noise of tf.random     -->  other seeds in each tower's copy (otherwise all draw the same)
    a loop that draws it   -->  one iteration at a time (otherwise the order of draws varies)

The functions that a graph calls (branches, loops, a `tf.function`) are changed, too. They get new
names, because a function's name stands for one definition in the whole process.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from towers.graph.walk import replace_tensors
from towers.machine.tensorflow_internals import read_instead
from towers.machine.user_lines import line_of, warn_user

_SUMS = ("AddN", "AccumulateNV2")
# TensorFlow 2.21: of 45 CPU kernels, only these gave other bits in 40 concurrent calls.
_UNORDERED = ("CropAndResizeGradImage", "CropAndResizeGradBoxes")
_LOOPS = ("While", "StatelessWhile")
_SEED_STEP = 7919  # the difference between the seeds of two towers


def sums_in_order(graph: tf.Graph, results: Any) -> Any:
    """Makes a graph that is being traced add from left to right; returns `results` with new sums.

    Functions that the graph calls stay as they are.
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
    return replace_tensors(results, sums)


def is_repeatable(definition: tf.compat.v1.GraphDef) -> bool:
    """Returns whether a graph is repeatable after `sums_in_order`, without further changes."""
    return not (any(map(_is_sum, _nodes_of_functions(definition))) or draws_noise(definition))


def warn_of_unordered_sums(graph: tf.Graph) -> None:
    """Warns of operations whose threads add to one sum in an arbitrary order."""
    for operation in graph.get_operations():
        if operation.type in _UNORDERED:
            warn_user(
                f"{line_of(operation)}: the gradient of tf.image.crop_and_resize adds in the order "
                "of its threads: its last bits differ from step to step. Take crops in the data "
                "pipeline, or give each operation one thread: python train.py --cpu_threads=1, or "
                "tf.config.threading.set_intra_op_parallelism_threads(1).",
            )


def has_unsaved_noise(definition: tf.compat.v1.GraphDef) -> bool:
    """Returns whether a graph, or a function in it, draws noise by tf.random, seeded or not."""
    return any("seed2" in n.attr for n in [*definition.node, *_nodes_of_functions(definition)])


def draws_noise(definition: tf.compat.v1.GraphDef) -> bool:
    """Returns whether copies of a graph, or of the functions in it, would draw equal noise."""
    return any(map(_draws, [*definition.node, *_nodes_of_functions(definition)]))


def is_ordered(definition: tf.compat.v1.GraphDef) -> bool:
    """Returns whether copies of a graph run one after another: it prints or calls Python."""
    nodes = [*definition.node, *_nodes_of_functions(definition)]
    return any(node.op in ("PyFunc", "EagerPyFunc", "PrintV2") for node in nodes)


UNSAVED_NOISE = (
    "the model draws noise by tf.random, which has no state to save: after a resume its noise "
    "differs. Draw it with keras.random and a keras.random.SeedGenerator of the layer."
)


def repeatable(definition: tf.compat.v1.GraphDef, tower: int) -> tf.compat.v1.GraphDef:
    """Returns the graph with sums from left to right, and with the noise of one tower, in order.

    Functions that the graph does not call are left out.
    """
    functions = {function.signature.name: function for function in definition.library.function}
    copy = tf.compat.v1.GraphDef(node=definition.node, versions=definition.versions)
    called: set[str] = set()
    waiting = list(copy.node)
    while waiting:
        for name in {reference.name for reference in _references(waiting.pop())} - called:
            called.add(name)
            waiting.extend(functions[name].node_def if name in functions else [])
    copy.library.function.extend(f for name, f in functions.items() if name in called)
    draws = any(map(_draws, _nodes_of_functions(definition)))  # by functions, as any loop does
    suffix = f"_tower_{tower}"
    # A first output has the name of its operation, and in a function also this ending.
    graphs = [(copy.node, ""), *((f.node_def, ":sum:0") for f in copy.library.function)]
    for nodes, ending in graphs:
        for node in nodes:
            if draws and node.op in _LOOPS:
                node.attr["parallel_iterations"].i = 1
            if _draws(node):  # tower 0 keeps the original seeds
                node.attr["seed2"].i += tower * _SEED_STEP
            for reference in _references(node):
                reference.name += suffix if reference.name in functions else ""
        _order_sums(nodes, ending)
    for function in copy.library.function:
        function.signature.name += suffix
    return copy


def _draws(node: Any) -> bool:
    """Returns whether an operation draws equal noise in every copy, because it has a seed."""
    return "seed2" in node.attr and bool(node.attr["seed"].i or node.attr["seed2"].i)


def _is_sum(node: Any) -> bool:
    return node.op in _SUMS and node.attr["N"].i > 2


def _order_sums(nodes: Any, ending: str) -> None:
    """Splits sums into sums of two, whose results end with `ending`."""
    ordered: list[Any] = []
    for node in nodes:
        if not _is_sum(node):
            ordered.append(node)
            continue
        left, *others = [name for name in node.input if not name.startswith("^")]
        control = [name for name in node.input if name.startswith("^")]
        for index, right in enumerate(others, 1):
            partial = tf.compat.v1.NodeDef()
            partial.CopyFrom(node)
            partial.op = "AddN"
            partial.name += "" if index == len(others) else f"_partial_{index}"
            partial.input[:] = [left, right, *control]
            partial.attr["N"].i = 2
            partial.attr.pop("shape", None)  # an attribute of AccumulateNV2
            ordered.append(partial)
            left = partial.name + ending
    if len(ordered) > len(nodes):
        copies = [tf.compat.v1.NodeDef.FromString(n.SerializeToString()) for n in ordered]
        del nodes[:]
        nodes.extend(copies)


def _nodes_of_functions(definition: tf.compat.v1.GraphDef) -> Iterator[Any]:
    return (node for function in definition.library.function for node in function.node_def)


def _references(node: Any) -> Iterator[Any]:
    """Yields the attributes of an operation that name functions."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        yield from value.list.func
