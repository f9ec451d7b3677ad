"""What a trace repeats is computed once, in the same bits; cuts into levels; sums in one order."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.custom_step.steps import layers, mean_square, pairs
from towers.custom_step.trace import trace_step
from towers.graph import repeatable as lib
from towers.graph.merged import compute_noise_keys_once, merge_repeats
from towers.machine.tensorflow_internals import define_functions

VECTOR = tf.TensorSpec([None])


def traced(function, *specs, merge=True):
    def merged(*arguments):
        return merge_repeats(function(*arguments))

    return tf.function(merged if merge else function, autograph=False) \
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
    pairs = zip(tf.nest.flatten(function(x)), tf.nest.flatten(before(x)), strict=True)
    for value, expected in pairs:
        assert value.numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_variable_is_read_again_after_an_assignment_alone(jit_compile):
    variable, other = tf.Variable([1.0]), tf.Variable([5.0])

    def assigns(x):
        a, b = variable + x, variable + x
        variable.assign_add(x)
        c, _ = variable + x, other.assign_add(x)
        tf.cond(x[0] > 0, lambda: variable.assign(x * 100), lambda: variable.assign(x))
        return merge_repeats((a, b, c, variable + x, other + x))

    function = tf.function(assigns, autograph=False, jit_compile=jit_compile or None)
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
    with pytest.raises(tf.errors.InvalidArgumentError, match="x > 0 did not hold"):
        function(tf.constant([-1.0]))


def test_an_error_still_tells_the_line_that_made_the_operation():
    def fails(x):
        return tf.ensure_shape(x + 1.0, [5]) + tf.ensure_shape(x + 1.0, [5])

    with pytest.raises(tf.errors.InvalidArgumentError, match="merged_test.py"):
        tf.function(traced(fails, VECTOR), input_signature=[VECTOR])(tf.ones([3]))


@pytest.mark.telling("seed1")
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


# Added from left to right, these are 1; from any other end, 0 or 2.
TERMS = [np.float32(v) for v in (1e8, -1e8, 1.0)]


def trace(function, *specs):
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def copied(traced, definition):
    """The function that a definition, made of a trace's, is."""

    def run(*values):
        return tf.graph_util.import_graph_def(
            definition, dict(zip([v.name for v in traced.inputs], values, strict=True)),
            [v.name for v in traced.outputs], name="")

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


def in_branch_of_loop(*values):
    def body(i, total):
        return i + 1, tf.cond(i > 0, lambda: tf.add_n([*values, total]), lambda: total)

    return tf.while_loop(lambda i, _: i < 2, body, [0, 0.0])[1]


@pytest.mark.parametrize("add", [
    lambda *values: tf.add_n(values),
    lambda *values: tf.math.accumulate_n(values, shape=[]),
    lambda *values: tf.function(tf.add_n, autograph=False)(list(values)),
    in_branch_of_loop,
])
def test_a_definitions_sums_are_made_from_left_to_right(add):
    traced = trace(add, *[tf.TensorSpec([])] * 3)
    definition = lib.repeatable(traced.graph.as_graph_def(), tower=0)
    sums = [n for n in nodes_of(definition) if n.op in ("AddN", "AccumulateNV2")]
    assert {node.attr["N"].i for node in sums} == {2}
    assert float(copied(traced, definition)(*TERMS)[0]) == 1.0


def drawn(value):
    return value + tf.random.normal([4], seed=1)


def mapped(value):
    return tf.map_fn(lambda v: v + tf.random.normal([], seed=1), value)


@pytest.mark.parametrize("draw", [
    drawn, mapped, lambda value: tf.cond(value[0] < 1, lambda: drawn(value), lambda: value),
    lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, drawn(v)), [0, x])[1],
])
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

    with pytest.warns(UserWarning, match=r"merged_test.py:\d+: the gradient of tf.image.crop"):
        lib.warn_of_unordered_sums(trace(gradient, tf.TensorSpec([1, 4, 4, 1])).graph)


class TwoUpdates(keras.Sequential):
    """The loss after an update, clipped, and a second update."""

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = mean_square(self, x, y)
            gradients = tape.gradient(loss, self.trainable_weights)
            gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"loss": loss}


def types(segment):
    return {op.type for op in segment.function_of(0).graph.get_operations()}


def test_towers_compute_gradients_and_home_clips_them():
    model = TwoUpdates(layers())
    model.compile("sgd")
    specs = tuple(tf.TensorSpec([None, *v.shape[1:]], "float32") for v in pairs())
    trace = trace_step(
        model, model.train_step, specs, parameter_device="/cpu:0", batch_norm="average")
    assert [m.level for m in trace.collectives.events] == [0, 2, 2]
    assert [u.level for u in trace.collectives.updates] == [1, 3]
    assert sorted(trace.towers) == [0, 2]
    assert all("MatMul" in types(segment) for segment in trace.towers.values())
    assert not any("MatMul" in types(segment) for segment in trace.central_segments.values())
    assert all("Sqrt" in types(trace.central_segments[level]) for level in (1, 3))
