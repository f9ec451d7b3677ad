"""Merges operations of a trace that compute equal values.

    Shape(x) ... Shape(x)          -->  Shape(x)    gradients repeat each size
    Sqrt(1 - Pow(b, Read(v))) ...  -->  one         optimizers repeat it for each parameter
    Read(v), Assign(v), Read(v)    stay             the second read has another value
    a noise key for each number    -->  one         in functions that XLA compiles

TensorFlow copies each operation to each device, and XLA compiles each. In ResNet50, 2,167 of a
tower's 6,907 operations repeat others, and 4,265 of the update's 10,279. The results stay
bit-identical.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import tensorflow as tf

from towers.graph.walk import replace_tensors
from towers.machine.tensorflow_internals import left_out, read_instead

_READ = "ReadVariableOp"
_KEPT = ("Placeholder", "Identity")  # an Identity deliberately separates its readers
# The Philox key by which TensorFlow scrambles a seed (stateless_random_ops.cc); Philox's number.
_SCRAMBLE_KEY, _PHILOX = 0x02461E293EC8F720, 1


def merge_repeats(results: Any) -> Any:
    """Merges operations of the graph that is being traced; returns `results` of those that stay."""
    graph = tf.compat.v1.get_default_graph()
    first: dict[Hashable, tf.Operation] = {}
    stands_for: dict[str, tf.Tensor] = {}
    assignments: Counter[str] = Counter()  # by variable
    repeated: set[str] = set()
    awaited: set[str] = set()
    for operation in graph.get_operations():
        value = _value(operation, assignments)
        if operation.type != _READ:
            assignments.update(v.name for v in operation.inputs if v.dtype == tf.resource)
        if value is not None and first.setdefault(value, operation) is not operation:
            repeated.add(operation.name)
            for old, new in zip(operation.outputs, first[value].outputs, strict=True):
                read_instead(old, new)
                stands_for[old.name] = new
        else:
            awaited.update(before.name for before in operation.control_inputs)
            groups = operation.colocation_groups()
            awaited.update(group.decode().removeprefix("loc:@") for group in groups)
    left_out(graph, repeated - awaited)
    return replace_tensors(results, stands_for)


def _value(operation: tf.Operation, assignments: Mapping[str, int]) -> Hashable:
    """Returns a key that is equal for operations of equal value, or None if that is unknown."""
    inputs = [v.name for v in operation.inputs]
    if operation.control_inputs or operation.type in _KEPT:
        return None
    if operation.type == _READ:
        return _READ, *inputs, assignments[inputs[0]]
    if operation.op_def.is_stateful or any(v.dtype == tf.variant for v in operation.outputs):
        return None  # a loop writes to each of its lists in place
    node = operation.node_def
    attributes = [(name, node.attr[name].SerializeToString()) for name in sorted(node.attr)]
    return node.op, node.device, *inputs, *attributes


def compute_noise_keys_once(graph: tf.Graph) -> None:
    """Makes XLA compute each noise key of a graph that is being traced once, bit-identically.

    TensorFlow scrambles a seed into a key by one operation. XLA fuses the scramble's elementwise
    steps into the noise and repeats them for every number, which takes 34 times as long on a CPU.
    XLA does not fuse a scramble by the random generator, which replaces it here, except in loops.
    """
    for operation in graph.get_operations():
        if operation.type == "StatelessRandomGetKeyCounter":
            with tf.device(operation.device):
                for old, new in zip(operation.outputs, _key(operation.inputs[0]), strict=True):
                    read_instead(old, new)


def _key(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the key, uint64 [1], and the counter, uint64 [2], of Philox noise for a seed [2]."""
    lower = tf.bitcast(tf.cast(seed, tf.int32), tf.uint32)  # XLA uses no more of a seed
    mix = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[4], key=tf.constant([_SCRAMBLE_KEY], tf.uint64), counter=tf.cast(lower, tf.uint64),
        alg=_PHILOX, dtype=tf.uint32,
    )
    key, count = tf.unstack(tf.bitcast(tf.reshape(mix, [2, 2]), tf.uint64))
    return tf.reshape(key, [1]), tf.stack([tf.zeros([], tf.uint64), count])
