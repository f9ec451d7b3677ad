"""Sums in one order, and noise of each tower's own: in a graph, and in the functions it calls."""

import numpy as np
import pytest
import tensorflow as tf

from towers.graph import repeatable as lib
from towers.machine.tensorflow_internals import define_functions

# Added from left to right, these are 1; from any other end, 0 or 2.
TERMS = [np.float32(v) for v in (1e8, -1e8, 1.0)]


def trace(function, *specs):
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def copied(traced, definition):
    """The function that a definition, made of a trace's, is."""

    def run(*values):
        return tf.graph_util.import_graph_def(
            definition, dict(zip([v.name for v in traced.inputs], values, strict=True)),
            [v.name for v in traced.outputs], name="",
        )

    define_functions(definition)
    return trace(run, *(tf.TensorSpec(v.shape, v.dtype) for v in traced.inputs))


def nodes_of(definition):
    """The nodes of the graph and of its functions."""
    return [*definition.node, *(n for f in definition.library.function for n in f.node_def)]


def test_a_sum_being_traced_is_made_from_left_to_right():
    def body(values):
        total = tf.add_n(values)
        return lib.sums_in_order(tf.compat.v1.get_default_graph(), [total, total * 2, None])

    traced = trace(body, [tf.TensorSpec([])] * 3)
    assert [float(v) for v in traced(TERMS)[:2]] == [1.0, 2.0]
    total, product = (tensor.op.inputs[0].op for tensor in traced.graph.outputs)
    assert product.inputs[0].op is total  # what reads the sum does, too
    first = total.inputs[0].op
    assert [*first.inputs, total.inputs[1]] == traced.inputs


def in_graph(*values):
    return tf.add_n(values)


def accumulated(*values):
    return tf.math.accumulate_n(values, shape=[])


def in_function(*values):
    return tf.function(tf.add_n, autograph=False)(list(values))


def in_branch_of_loop(*values):
    def body(i, total):
        return i + 1, tf.cond(i > 0, lambda: tf.add_n([*values, total]), lambda: total)

    return tf.while_loop(lambda i, _: i < 2, body, [0, 0.0])[1]


@pytest.mark.parametrize("add", [in_graph, accumulated, in_function, in_branch_of_loop])
def test_a_definitions_sums_are_made_from_left_to_right(add):
    traced = trace(add, *[tf.TensorSpec([])] * 3)
    definition = lib.repeatable(traced.graph.as_graph_def(), tower=0)
    sums = [n for n in nodes_of(definition) if n.op in ("AddN", "AccumulateNV2")]
    assert {node.attr["N"].i for node in sums} == {2}
    assert float(copied(traced, definition)(*TERMS)[0]) == 1.0


def drawn(value):
    return value + tf.random.normal([4], seed=1)


def drawn_in_loop(value):
    return tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, drawn(v)), [0, value])[1]


def drawn_in_branch(value):
    return tf.cond(value[0] < 1, lambda: drawn(value), lambda: value)


def mapped(value):
    return tf.map_fn(lambda v: v + tf.random.normal([], seed=1), value)


@pytest.mark.parametrize("draw", [drawn, drawn_in_loop, drawn_in_branch, mapped])
def test_each_towers_copy_draws_its_own_noise_and_the_same_each_time(draw):
    traced = trace(draw, tf.TensorSpec([4]))

    def draws_of(tower):
        definition = lib.repeatable(traced.graph.as_graph_def(), tower)
        return copied(traced, definition)(tf.zeros([4]))[0].numpy()

    rows = [draws_of(tower) for tower in (0, 1, 2)]
    assert len(np.unique(rows)) == 12
    np.testing.assert_array_equal(draws_of(1), rows[1])


def test_a_loop_that_draws_makes_one_iteration_after_the_other():
    def loops_of(function):
        traced = trace(function, tf.TensorSpec([4]))
        definition = lib.repeatable(traced.graph.as_graph_def(), tower=0)
        loops = [node for node in nodes_of(definition) if "While" in node.op]
        return [node.attr["parallel_iterations"].i for node in loops]

    assert loops_of(mapped) == [1]
    assert loops_of(lambda value: tf.map_fn(lambda v: v + 1, value)) == [10]


def test_a_gradient_that_adds_in_the_order_of_threads_is_warned_of():
    def gradient(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            crops = tf.image.crop_and_resize(images, [[0.0, 0.0, 1.0, 1.0]], [0], [3, 3])
        return tape.gradient(crops, images)

    with pytest.warns(UserWarning, match=r"repeatable_test.py:\d+: the gradient of tf.image.crop"):
        lib.warn_of_unordered_sums(trace(gradient, tf.TensorSpec([1, 4, 4, 1])).graph)
