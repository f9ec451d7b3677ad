"""What a trace computes again and again is computed once.

    Shape(x) ... Shape(x)          -->  Shape(x)    gradients ask for each size anew
    Sqrt(1 - Pow(b, Read(v))) ...  -->  one         optimizers do so for each parameter
    Read(v), Assign(v), Read(v)    stay             the second read has another value
    a noise's key, by each number  -->  one         in what XLA compiles

TensorFlow makes each operation anew on each device, and XLA compiles each. Of ResNet50's
6,907 operations of a tower 2,167 repeat others, of 10,279 of its update 4,265. The values stay, and
their bits.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from towers.machine.tensorflow_internals import left_out, read_instead

_READ = "ReadVariableOp"
_KEPT = ("Placeholder", "Identity")  # an identity is there to keep two readers apart
_NOISE_KEY = "StatelessRandomGetKeyCounter"
# Philox's, by which TensorFlow scrambles a seed (stateless_random_ops.cc), and its number.
_SCRAMBLE_KEY, _PHILOX = 0x02461E293EC8F720, 1


def once(function: Callable) -> Callable:
    """The function, to be traced, with `repeated_once` for its graph."""

    @functools.wraps(function)
    def merged(*arguments: Any) -> Any:
        return repeated_once(tf.compat.v1.get_default_graph(), function(*arguments))

    return merged


def repeated_once(graph: tf.Graph, results: Any) -> Any:
    """Merges the operations, of a graph that is being traced, that have the same value.

    Args:
        graph: with all that it is to hold.
        results: a structure of its tensors.

    Returns:
        `results`, with the tensor that stands for each one that was left out.
    """
    first: dict[Hashable, tf.Operation] = {}
    stands_for: dict[str, tf.Tensor] = {}
    assignments: Counter[str] = Counter()  # by the variable
    operations = graph.get_operations()
    repeated: set[str] = set()
    for operation in operations:
        value = _value(operation, assignments)
        if operation.type != _READ:
            assignments.update(v.name for v in operation.inputs if v.dtype == tf.resource)
        if value is not None and first.setdefault(value, operation) is not operation:
            repeated.add(operation.name)
            for old, new in zip(operation.outputs, first[value].outputs, strict=True):
                read_instead(old, new)
                stands_for[old.name] = new
    left_out(graph, repeated - _named(op for op in operations if op.name not in repeated))

    def replaced(value: Any) -> Any:
        return stands_for.get(value.name, value) if tf.is_symbolic_tensor(value) else value

    return tf.nest.map_structure(replaced, results, expand_composites=True)


def noise_keys_once(graph: tf.Graph) -> None:
    """Computes each key of noise once in what XLA compiles, with the same bits.

    TensorFlow makes a key of a seed, scrambled, by one operation. XLA computes it in elementwise
    steps, which it fuses into the noise: again for every number, 34 times the time on a CPU. A
    scramble by the generator itself is not fused.

    Args:
        graph: of a function for XLA, still being traced; noise in its loops stays.
    """
    for operation in graph.get_operations():
        if operation.type == _NOISE_KEY:
            with tf.device(operation.device):
                for old, new in zip(operation.outputs, _key(operation.inputs[0]), strict=True):
                    read_instead(old, new)


def _key(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The key, uint64 [1], and the counter, uint64 [2], of noise by Philox from a seed, [2]."""
    lower = tf.bitcast(tf.cast(seed, tf.int32), tf.uint32)  # all that XLA takes of a seed
    mix = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[4], key=tf.constant([_SCRAMBLE_KEY], tf.uint64), counter=tf.cast(lower, tf.uint64),
        alg=_PHILOX, dtype=tf.uint32,
    )
    key, count = tf.unstack(tf.bitcast(tf.reshape(mix, [2, 2]), tf.uint64))
    return tf.reshape(key, [1]), tf.stack([tf.zeros([], tf.uint64), count])


def _value(operation: tf.Operation, assignments: Mapping[str, int]) -> Hashable:
    """What an operation computes: equal for two of the same value; None where nobody can tell."""
    inputs = [v.name for v in operation.inputs]
    if operation.control_inputs or operation.type in _KEPT:
        return None
    if operation.type == _READ:
        return _READ, *inputs, assignments[inputs[0]]
    if operation.op_def.is_stateful or any(v.dtype == tf.variant for v in operation.outputs):
        return None  # a loop writes each list of its own in place
    node = operation.node_def
    attributes = [(name, node.attr[name].SerializeToString()) for name in sorted(node.attr)]
    return node.op, node.device, *inputs, *attributes


def _named(operations: Iterable[tf.Operation]) -> set[str]:
    """The operations that these wait for, or are placed with."""
    return {
        name for operation in operations
        for name in [
            *(before.name for before in operation.control_inputs),
            *(group.decode().removeprefix("loc:@") for group in operation.colocation_groups()),
        ]
    }
