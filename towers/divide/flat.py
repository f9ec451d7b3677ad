"""Flattens a traced step: a list of operations, in which called functions are put in place."""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache

import tensorflow as tf

from towers.divide.facts import Op, Value
from towers.machine.tensorflow_internals import called_graphs, is_compiled

_numbers = itertools.count()
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
LOOPS, CONDITIONS = ("While", "StatelessWhile"), ("If", "StatelessIf")
_BODIES = ("body", "cond", "then_branch", "else_branch")
_READS = ("ReadVariableOp", "VariableShape")  # stateful for TensorFlow, but they change nothing
NOT_RUN = ("Placeholder", "NoOp")
MARKER = "own_moments_"  # begins the names of operations that mark statistics, see `own_moments`


def new_op(
    kind: str, source: tf.Operation, inputs: Sequence[Value], outputs: Iterable[tf.Tensor]
) -> Op:
    """Returns an operation with new outputs, which have the types and shapes of `outputs`."""
    op = Op(f"o{next(_numbers)}", kind, source, list(inputs), [], path=source.name)
    op.outputs = [Value(op, i, tensor.dtype, tensor.shape) for i, tensor in enumerate(outputs)]
    return op


def inputs_of(ops: Iterable[Op]) -> list[Value]:
    """Returns the values that operations read."""
    return [value for op in ops for value in op.inputs]


def outputs_of(ops: Iterable[Op]) -> list[Value]:
    """Returns the values that operations make."""
    return [value for op in ops for value in op.outputs]


def flatten(graph: tf.Graph, input_values: Mapping[int, Value]) -> tuple[list[Op], list[Value]]:
    """Returns the operations of a FuncGraph in an order that they can run in, and its outputs.

    input_values: the values of the graph's inputs, by the tensor's id. Operations follow those
    whose results they read and those that the trace runs before them.
    """
    ops: list[Op] = []
    values = dict(input_values)
    for operation in _in_order(graph):
        if operation.type in NOT_RUN:
            continue
        inputs = [values[id(tensor)] for tensor in operation.inputs]
        called = called_graphs(operation, "f") if operation.type in CALLS else []
        # A call is put in place, so that rules and phases see what it does.
        if called:
            arguments = {id(t): v for t, v in zip(called[0].inputs, inputs, strict=True)}
            inner, results = flatten(called[0], arguments)
            for op in inner:
                op.path = f"{operation.name}/{op.path}"
                op.needs_xla |= is_compiled(operation) and _lacks_kernel(op)
            ops += inner
            results = results[: len(operation.outputs)]  # a second gradient adds outputs later
        elif operation.type == "IdentityN" and MARKER not in operation.name:
            results = inputs  # tf.custom_gradient makes one of all its results
        elif operation.type == "ResourceGather":
            added, results = _as_gather(operation, inputs)
            for op in added:
                op.path = operation.name  # the new sources are in no name scope
            ops += added
        elif operation.type == "ShapeN":
            added, results = _as_shapes(operation, inputs)
            ops += added
        else:
            ops.append(new_op(operation.type, operation, inputs, operation.outputs))
            results = _unchanged(operation, inputs, ops[-1].outputs)
        values.update({id(t): v for t, v in zip(operation.outputs, results, strict=True)})
    return ops, [values[id(tensor)] for tensor in graph.outputs]


def _lacks_kernel(op: Op) -> bool:
    """Returns whether TensorFlow itself cannot compute what Keras has XLA compile: groups.

    On CPUs, TensorFlow's own kernels can be 40 times as fast as XLA, but lack some dtypes.
    """
    if "Conv2D" in op.type:
        return not _has_groups(op.outputs[0].dtype)
    return "Conv3D" in op.type


@cache
def _has_groups(dtype: tf.DType) -> bool:
    """Returns whether TensorFlow's gradient of a 2D convolution has groups: by oneDNN on CPUs."""
    try:
        with tf.init_scope(), tf.device("/cpu:0"):
            channels = tf.ones([1, 1, 1, 2], dtype)  # each is a group
            tf.raw_ops.Conv2DBackpropFilter(
                input=channels, filter_sizes=[1, 1, 1, 2], out_backprop=channels,
                strides=[1, 1, 1, 1], padding="VALID",
            )  # fmt: skip
    except tf.errors.OpError:
        return False
    return True


def _unchanged(operation: tf.Operation, inputs: list[Value], outputs: list[Value]) -> list[Value]:
    """Returns the results; for what a loop passes on unchanged, its input."""
    bodies = called_graphs(operation, "body") if operation.type in LOOPS else []
    if not bodies:
        return outputs
    pairs = zip(bodies[0].inputs, bodies[0].outputs, inputs, outputs, strict=True)
    return [given if before is after else result for before, after, given, result in pairs]


def _in_order(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations in an order that they can run in, usually the order of the trace.

    The gradient of a loop adds inputs to the loop, which then come later in the trace.
    """
    order: dict[int, tf.Operation] = {}
    for operation in graph.get_operations():
        stack = [operation]
        while stack:
            last = stack[-1]
            before = (*(tensor.op for tensor in last.inputs), *last.control_inputs)
            waiting = [other for other in before if id(other) not in order]
            stack += waiting
            if not waiting:
                order.setdefault(id(last), stack.pop())
    return list(order.values())


def _as_gather(operation: tf.Operation, inputs: list[Value]) -> tuple[list[Op], list[Value]]:
    """Returns a lookup in a variable as a read and a gather, which towers can do with the value."""
    handle, indices = inputs
    resource = operation.inputs[0]
    graph = operation.graph
    with graph.as_default():
        table = tf.raw_ops.ReadVariableOp(resource=resource, dtype=operation.outputs[0].dtype)
        gather = tf.raw_ops.GatherV2(
            params=table, indices=operation.inputs[1], axis=tf.constant(0),
            batch_dims=operation.get_attr("batch_dims"),
        )  # fmt: skip
    read = new_op("ReadVariableOp", table.op, [handle], [table])
    axis = new_op("Const", gather.op.inputs[2].op, [], [gather.op.inputs[2]])
    found = new_op(
        "GatherV2", gather.op, [read.outputs[0], indices, axis.outputs[0]], operation.outputs
    )
    return [read, axis, found], found.outputs


def _as_shapes(operation: tf.Operation, inputs: list[Value]) -> tuple[list[Op], list[Value]]:
    """Returns shapes of several tensors, one by one, because TensorFlow evaluates only these."""
    with operation.graph.as_default():
        dtype = operation.get_attr("out_type")
        shapes = [tf.raw_ops.Shape(input=tensor, out_type=dtype) for tensor in operation.inputs]
    ops = [new_op("Shape", s.op, [v], [s]) for s, v in zip(shapes, inputs, strict=True)]
    return ops, [op.outputs[0] for op in ops]


def is_noise(kind: str) -> bool:
    """Returns whether operations of a type compute noise from a seed, or what it begins with."""
    return kind.startswith("Stateless") and kind not in (*LOOPS, *CONDITIONS, "StatelessCase")


def has_effects(op: Op) -> bool:
    """Returns whether an operation must run even if no operation reads its results."""
    return _changes(op.source)


def _changes(operation: tf.Operation) -> bool:
    """Returns whether an operation changes a state, prints, checks or calls Python."""
    if not operation.op_def.is_stateful or operation.type in (*_READS, "Placeholder"):
        return False
    if operation.type not in (*LOOPS, *CONDITIONS, *CALLS):
        return True
    # TensorFlow marks each loop that reads a variable as stateful; look at what its functions do.
    names = ("f",) if operation.type in CALLS else _BODIES
    has = [name for name in names if name in operation.node_def.attr]
    graphs = [graph for name in has for graph in called_graphs(operation, name)]
    # A function whose definition is unknown may change something.
    is_known = len(graphs) == len(has)
    return not is_known or any(_changes(op) for graph in graphs for op in graph.get_operations())


def live(ops: Sequence[Op], outputs: Iterable[Value]) -> list[Op]:
    """Returns the operations that the outputs need, and those with effects, in their order."""
    wanted = {id(value) for value in outputs}
    kept = []
    for op in reversed(ops):
        if has_effects(op) or any(id(value) in wanted for value in op.outputs):
            kept.append(op)
            wanted.update(id(value) for value in op.inputs)
    return kept[::-1]


def merged(ops: Iterable[Op], outputs: Sequence[Value]) -> tuple[list[Op], list[Value]]:
    """Leaves out operations that repeat others, as optimizers do for each parameter.

    A variable is read again after each change. Operations that read an Identity stay apart, because
    a layer that is recomputed for its gradient has one.
    """
    first: dict[Hashable, Op] = {}
    same: dict[Value, Value] = {}
    changes: Counter[Value] = Counter()
    kept = []
    # One operation with several readers becomes one value, for which towers meet once.
    for op in ops:
        op.inputs = [same.get(value, value) for value in op.inputs]
        # Two reads of a variable are the same value only if nothing changed it between them.
        if has_effects(op):
            changes.update(op.states)
        key = None if _is_apart(op) else (_kind(op), *op.inputs, *(changes[v] for v in op.states))
        if key is None or first.setdefault(key, op) is op:
            kept.append(op)
        else:
            same.update(zip(op.outputs, first[key].outputs, strict=True))
    return kept, [same.get(value, value) for value in outputs]


def _is_apart(op: Op) -> bool:
    """Returns whether an operation may not stand for another one."""
    is_read = op.type == "ReadVariableOp"
    is_list = any(value.dtype == tf.variant for value in op.outputs)
    return op.is_stateful and not is_read or is_list or op.type == "Identity"


def _kind(op: Op) -> Hashable:
    """Returns what equal operations have in common, but for their inputs."""
    attributes = op.source.node_def.attr
    return op.type, *(
        (name, attributes[name].SerializeToString())
        for name in sorted(attributes)
        if not name.startswith("_")
    )
