"""What a trace repeats is computed once, in the same bits; what only looks alike stays."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from towers.graph.merged import compute_noise_keys_once, with_merged_repeats

VECTOR = tf.TensorSpec([None])


def traced(function, *specs, merge=True):
    return tf.function(with_merged_repeats(function) if merge else function, autograph=False) \
        .get_concrete_function(*specs)


def counts(function):
    """The operations of the function that TensorFlow runs, by their kind."""
    return Counter(node.op for node in function.function_def.node_def)


def test_operations_of_one_value_are_one_and_those_of_others_stay():
    def repeats(x):
        a, b = (tf.sqrt(x + 1.0) * tf.cast(tf.shape(x)[0], tf.float32) for _ in range(2))
        return a, [b, tf.sqrt(x + 2.0), a + b]

    function, x = traced(repeats, VECTOR), tf.constant([1.0, 2.0, 5.0])
    found = counts(function)
    assert (found["Shape"], found["Sqrt"], found["Cast"], found["Mul"]) == (1, 2, 1, 1)
    before = traced(repeats, VECTOR, merge=False)
    assert counts(before)["Sqrt"] == 3 and counts(before)["Shape"] == 2
    for value, expected in zip(tf.nest.flatten(function(x)), tf.nest.flatten(before(x))):
        assert value.numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_variable_is_read_again_after_an_assignment_alone(jit_compile):
    variable, other = tf.Variable([1.0]), tf.Variable([5.0])

    def assigns(x):
        a, b = variable + x, variable + x
        variable.assign_add(x)
        c, _ = variable + x, other.assign_add(x)
        tf.cond(x[0] > 0, lambda: variable.assign(x * 100), lambda: variable.assign(x))
        return a, b, c, variable + x, other + x

    merged = with_merged_repeats(assigns)
    function = tf.function(merged, autograph=False, jit_compile=jit_compile or None)
    found = [float(v[0]) for v in function(tf.constant([2.0]))]
    assert found == [3, 3, 5, 202, 9]
    reads = counts(function.get_concrete_function(tf.constant([2.0])))["ReadVariableOp"]
    assert reads == 4  # of `variable` at first and after each assignment; of `other` after its own


def test_noise_effects_and_what_waits_stay():
    def acts(x):
        drawn = [tf.random.normal([2]) for _ in range(2)]
        first = x + 1.0
        with tf.control_dependencies([first]):
            late = x + 1.0
        with tf.control_dependencies([x + 1.0]):  # merged, and yet waited for
            later = x * 3.0
        tf.debugging.assert_positive(x)
        tf.debugging.assert_positive(x)
        kept = tf.identity(x), tf.identity(x)
        return drawn, first, late, later, kept

    function = traced(acts, VECTOR)
    found = counts(function)
    assert found["RandomStandardNormal"] == 2 and found["Identity"] >= 2
    assert found["AddV2"] == 3 + 2  # these: of what is drawn
    drawn, *others = function(tf.constant([1.0]))
    assert np.all(drawn[0] != drawn[1])
    assert [float(v[0]) for v in tf.nest.flatten(others)] == [2, 2, 3, 1, 1]
    with pytest.raises(tf.errors.InvalidArgumentError):
        function(tf.constant([-1.0]))


def test_an_error_still_tells_the_line_that_made_the_operation():
    def fails(x):
        return tf.ensure_shape(x + 1.0, [5]) + tf.ensure_shape(x + 1.0, [5])

    with pytest.raises(tf.errors.InvalidArgumentError, match="merged_test.py"):
        tf.function(traced(fails, VECTOR), input_signature=[VECTOR])(tf.ones([3]))


@pytest.mark.parametrize("seed", [
    np.int32([1, 2]), np.int32([-7, -(2**31)]), np.int64([2**40 + 3, -5]),
])
def test_a_key_of_noise_is_not_computed_for_every_number_by_xla_in_the_same_bits(seed):
    """A key is one operation before; afterwards the noise reads what the generator returned."""
    def draws(seed):
        numbers = tf.random.stateless_normal([3, 5], seed)
        return numbers, tf.nn.experimental.stateless_dropout(numbers, 0.5, seed + 1)

    def draws_once(seed):
        numbers = draws(seed)
        compute_noise_keys_once(tf.compat.v1.get_default_graph())
        return numbers

    seed = tf.constant(seed)
    before, after = (tf.function(f, autograph=False, jit_compile=True) for f in (draws, draws_once))
    for value, expected in zip(after(seed), before(seed), strict=True):
        assert value.numpy().tobytes() == expected.numpy().tobytes()
    graph = after.get_concrete_function(seed).graph
    kinds = Counter(op.type for op in graph.get_operations())
    assert kinds["StatelessRandomUniformFullIntV2"] == kinds["StatelessRandomGetKeyCounter"] == 2
    keys = [op for op in graph.get_operations() if op.type == "StatelessRandomGetKeyCounter"]
    assert not any(value.consumers() for op in keys for value in op.outputs)
