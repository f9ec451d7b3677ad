"""Makes a divided step bit-identical every time, and in every worker.

    AddN(a, b, c)          -->  AddN(AddN(a, b), c)    AddN begins with whichever buffer is free
    a loop that draws      -->  one iteration at a time (otherwise the order of draws varies)
    what one worker draws  -->  all workers have the chief's

Only loops, conditions and functions that run once are changed here. In towers they are copied
operation by operation.
"""

from collections.abc import Iterable, Iterator, MutableSequence

import tensorflow as tf

from towers.divide.flat import CALLS, CONDITIONS, LOOPS
from towers.machine.tensorflow_internals import called_graphs, define_functions
from towers.machine.user_lines import line_of, warn_user

SUMS = ("AddN", "AccumulateNV2")
# TensorFlow 2.21: of 45 CPU kernels, only these gave other bits in 40 concurrent calls.
_UNORDERED = ("CropAndResizeGradImage", "CropAndResizeGradBoxes")
_PYTHON = ("PyFunc", "EagerPyFunc")
_FUNCTIONS = ("f", "body", "cond", "then_branch", "else_branch", "branches")
_SUFFIX = "_in_order"

UNSAVED_NOISE = (
    "the model draws noise by tf.random, which has no state to save: after a resume its noise "
    "differs. Draw it with keras.random and a keras.random.SeedGenerator of the layer."
)


def all_operations(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields operations, and the operations of the functions that they call."""
    for operation in operations:
        yield operation
        for name in _FUNCTIONS if calls_functions(operation) else ():
            if name in operation.node_def.attr:
                for graph in called_graphs(operation, name):
                    yield from all_operations(graph.get_operations())


def calls_functions(operation: tf.Operation) -> bool:
    """Returns whether an operation is a loop, a condition or a call."""
    return operation.type in (*LOOPS, *CONDITIONS, *CALLS, "Case", "StatelessCase")


def draws(operation: tf.Operation) -> bool:
    """Returns whether workers may get different results, because of tf.random or Python."""
    return any(_draws_noise(op) or op.type in _PYTHON for op in all_operations([operation]))


def has_unsaved_noise(graph: tf.Graph) -> bool:
    """Returns whether a graph, or a function in it, draws noise by tf.random, seeded or not."""
    return any(map(_draws_noise, all_operations(graph.get_operations())))


def _draws_noise(operation: tf.Operation) -> bool:
    return operation.op_def.is_stateful and "seed2" in operation.node_def.attr


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


def in_order(operation: tf.Operation) -> dict[str, tf.compat.v1.AttrValue]:
    """Returns other attributes for a loop, a condition or a call, which give it an order.

    The functions in them get new names, because a function's name stands for one definition in the
    whole process.
    """
    inner = list(all_operations([operation]))[1:]
    is_drawn = any(map(_draws_noise, inner))
    if not is_drawn and not any(op.type in SUMS and len(op.inputs) > 2 for op in inner):
        return {}
    definition = operation.graph.as_graph_def()
    called = operation.node_def
    functions = {each.signature.name: each for each in definition.library.function}
    # A function keeps its first definition for the process, so changed functions get new names,
    # and each call of them must use these.
    for nodes in ([called], *(function.node_def for function in functions.values())):
        for node in nodes:
            if is_drawn and node.op in LOOPS:
                node.attr["parallel_iterations"].i = 1
            for reference in _references(node):
                reference.name += _SUFFIX if reference.name in functions else ""
    for function in functions.values():
        function.signature.name += _SUFFIX
        _order_sums(function.node_def)
    define_functions(definition)
    changed = ("parallel_iterations", *_FUNCTIONS)
    return {name: called.attr[name] for name in changed if name in called.attr}


def _order_sums(nodes: MutableSequence[tf.compat.v1.NodeDef]) -> None:
    """Splits sums in a function into sums of two."""
    ordered: list[tf.compat.v1.NodeDef] = []
    for node in nodes:
        values = [name for name in node.input if not name.startswith("^")]
        if node.op not in SUMS or len(values) < 3:
            ordered.append(node)
            continue
        control = [name for name in node.input if name.startswith("^")]
        left, *others = values
        for index, right in enumerate(others, 1):
            partial = tf.compat.v1.NodeDef()
            partial.CopyFrom(node)
            partial.op = "AddN"
            partial.name += "" if index == len(others) else f"_partial_{index}"
            partial.input[:] = [left, right, *control]
            partial.attr["N"].i = 2
            partial.attr.pop("shape", None)  # an attribute of AccumulateNV2
            ordered.append(partial)
            left = f"{partial.name}:sum:0"
    if len(ordered) > len(nodes):
        copies = [tf.compat.v1.NodeDef.FromString(n.SerializeToString()) for n in ordered]
        del nodes[:]
        nodes.extend(copies)


def _references(node: tf.compat.v1.NodeDef) -> Iterator[tf.compat.v1.NameAttrList]:
    """Yields the attributes of an operation that name functions."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        yield from value.list.func
