"""A test for each private part of TensorFlow that towers uses."""

import contextlib
import gc
import re
import weakref

import pytest
import tensorflow as tf

from tests import processes
from towers.machine import tensorflow_internals


# start_collectives and health_error: tests/workers/workers_test.py


def test_ends_in_batch():
    rows = tf.data.Dataset.range(4)
    found = [
        tensorflow_internals.ends_in_batch(data)
        for data in (
            rows.batch(2),
            rows.batch(2, num_parallel_calls=2).shuffle(2).cache().repeat().take(2),
            rows.padded_batch(2).skip(1).prefetch(1).with_options(tf.data.Options()),
            rows,
            rows.batch(2).unbatch(),
            rows.batch(2).map(lambda x: x).prefetch(1),
        )
    ]
    assert found == [True] * 3 + [False] * 3


def test_keep_whole():
    attributes = tensorflow_internals.KEEP_WHOLE
    marked = tf.function(lambda x: x * 2.0, experimental_attributes=attributes)
    definition = marked.get_concrete_function(tf.TensorSpec([])).function_def
    assert [definition.attr[name].b for name in attributes] == [True]


def test_is_compiled():
    def calls(compiled, plain):
        with tf.GradientTape() as tape:
            tape.watch(compiled)
            doubled = tf.function(lambda x: x * x, jit_compile=True)(compiled)
        tf.function(lambda x: x * x)(plain)
        return tape.gradient(doubled, compiled)

    graph = tf.function(calls).get_concrete_function(tf.TensorSpec([]), tf.TensorSpec([])).graph
    found = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    compiled = [tensorflow_internals.is_compiled(op) for op in found]
    assert compiled == [True, False, True]  # its gradient, too


def test_own_threads():
    """Four devices have four more pools of five threads than one pool for all."""
    code = """if True:
        import os
        import tensorflow as tf
        import towers
        tf.config.threading.set_intra_op_parallelism_threads(5)
        towers.logical_cpus(4)
        os.environ[{!r}] = {!r}
        tf.constant(1)
        print(len(os.listdir("/proc/self/task")))
    """
    counts = []
    for value in ("true", "false"):
        done = processes.run("-c", code.format(tensorflow_internals.OWN_THREADS, value))
        counts.append(int(done.stdout))
    assert counts[0] - counts[1] == 3 * 5


def test_colocation():
    with tf.Graph().as_default() as graph:
        one = tf.constant(1.0, name="one")
        with tf.compat.v1.colocate_with(one):
            tf.identity(one, name="two")
    nodes = {node.name: node for node in graph.as_graph_def().node}
    assert nodes["two"].attr[tensorflow_internals.COLOCATION].list.s == [b"loc:@one"]


def test_define_functions():
    inner = tf.function(lambda x: x * 2.0, autograph=False)
    definition = (
        tf.function(inner, autograph=False)
        .get_concrete_function(tf.TensorSpec([]))
        .graph.as_graph_def()
    )
    (function,) = definition.library.function
    (call,) = (node for node in definition.node if "PartitionedCall" in node.op)
    function.signature.name = call.attr["f"].func.name = "test_define_functions"

    def run(x):
        name = next(node.name for node in definition.node if node.op == "Placeholder")
        return tf.graph_util.import_graph_def(definition, {name: x}, [f"{call.name}:0"], name="")[0]

    tensorflow_internals.define_functions(definition)
    traced = tf.function(run, autograph=False).get_concrete_function(tf.TensorSpec([]))
    outer = tf.function(lambda x: traced(x) + 1.0, autograph=False)
    assert float(outer(tf.constant(3.0))) == 7.0


def test_called_graphs():
    @tf.function(autograph=False)
    def calls(x):
        inner = tf.function(lambda v: tf.tanh(v), autograph=False)(x)
        return tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, tf.exp(v)), [0, inner])

    operations = calls.get_concrete_function(tf.TensorSpec([None])).graph.get_operations()
    found = {
        op.type: [inner.type for inner in graph.get_operations()]
        for op in operations
        for name in ("f", "body")
        for graph in tensorflow_internals.called_graphs(op, name)
    }
    assert "Tanh" in found["PartitionedCall"] and "Exp" in found["StatelessWhile"]


def test_custom_gradients_in_scope():
    @tf.function
    def inner(x):
        return tf.nn.silu(x)

    with tf.Graph().as_default() as graph, tf.GradientTape() as tape:
        x = tf.compat.v1.placeholder(tf.float32, [3])
        tape.watch(x)
        with tensorflow_internals.custom_gradients_in_scope():
            with tf.name_scope("first"):
                y = tf.nn.silu(x)
            with tf.name_scope("second"):
                y = inner(y)
        known = {op.name for op in graph.get_operations()}
        gradient = tape.gradient(y, x)
    new = [op.name for op in graph.get_operations() if op.name not in known]
    scopes = {re.match(r"gradient_tape/(\w+)/", n) for n in new if "ones" not in n.lower()}
    assert {m and m[1] for m in scopes} - {None} == {"first", "second"}
    assert gradient.op.name.startswith("gradient_tape/first/")


def test_custom_gradients_are_forgotten_with_the_graphs_that_they_keep():
    def traced(forgotten):
        @tf.custom_gradient
        def doubled(x):
            return 2 * x, lambda dy: 2 * dy

        graph = tf.Graph()
        with graph.as_default(), forgotten:
            doubled(tf.ones([3]))
        return weakref.ref(graph)

    gone = traced(tensorflow_internals.custom_gradients_forgotten())
    kept = traced(contextlib.nullcontext())
    gc.collect()
    assert gone() is None
    assert kept() is not None, "TensorFlow keeps no graph any more: nothing needs to be forgotten"


def test_none_spec():
    data = tf.data.Dataset.range(2).map(lambda i: (i, None))
    assert isinstance(data.element_spec[1], tensorflow_internals.NONE_SPEC)


def test_evaluated():
    with tf.Graph().as_default():
        known = tf.reduce_prod(tf.shape(tf.zeros([2, 3])))
        follows_from_data = tf.size(tf.where(tf.compat.v1.placeholder(tf.bool, [4])))
        assert tensorflow_internals.evaluated(known) == 6
        assert tensorflow_internals.evaluated(follows_from_data) is None
        assert tensorflow_internals.evaluated(tf.constant(1.0)) is None


def test_copied():
    attribute = tf.compat.v1.AttrValue(type=tf.int64.as_datatype_enum)
    specs = [tf.TensorSpec([]), tf.TensorSpec([])]
    traced = tf.function(tf.subtract).get_concrete_function(*specs)
    (subtract,) = (op for op in traced.graph.get_operations() if op.type == "Sub")
    cast = tf.function(lambda x: tf.cast(x, tf.int32)).get_concrete_function(specs[0])
    (to_int,) = (op for op in cast.graph.get_operations() if op.type == "Cast")
    outside = tf.constant(1.5)

    @tf.function(input_signature=specs[:1])
    def copies(x):
        difference = tensorflow_internals.copied(subtract, [x, outside])
        return [*difference, *tensorflow_internals.copied(to_int, difference, {"DstT": attribute})]

    difference, integer = copies(tf.constant(4.0))
    assert difference == 2.5 and integer == 2 and integer.dtype == tf.int64


def test_traced_graph():
    def function(x):
        variable = tf.Variable([2.0])
        variable.assign_add(x)
        return variable * x

    graph, made = tensorflow_internals.traced_graph(function, [tf.TensorSpec([1])])
    assert [tensor.op.name for tensor in graph.inputs][:1] == ["data"]
    assert [v.numpy() for v in made] == [2]  # made once, and nothing has run
    assert [v.handle is handle for v, handle in zip(made, graph.external_captures)] == [True]
    assert graph.structured_outputs.shape == [1]


def test_first_values_of_variables_are_lifted_out_of_the_graph():
    weight = tf.Variable([1.0, 2.0])

    def of_weight(x):
        return tf.Variable(tf.zeros_like(weight) + 2) * x

    _, made = tensorflow_internals.traced_graph(of_weight, [tf.TensorSpec([])])
    assert made[0].numpy().tolist() == [2, 2]
    with pytest.raises(ValueError, match="initial_value"):
        tensorflow_internals.traced_graph(lambda data: tf.Variable(data), [tf.TensorSpec([])])


def test_without_xla():
    """XLA has no operations for text."""

    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec([], tf.string)])
    def compiled(text):
        return tf.strings.length(text)

    @tf.function(autograph=False)
    def length(text):
        return tensorflow_internals.without_xla(compiled, text)

    assert length(tf.constant("four")) == 4
    with pytest.raises(tf.errors.InvalidArgumentError, match="(?i)xla"):
        compiled("four")
