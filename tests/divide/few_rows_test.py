"""A size that is the same at all probes is no constant if a real batch has another one."""

import numpy as np
import tensorflow as tf

from towers.divide.divided import Divided
from towers.divide.facts import SIZE
from towers.divide.flat import flatten, new_op
from towers.divide.machines import Machine
from towers.divide.probes import Probes
from towers.machine.tensorflow_internals import traced_graph
from towers.step.exchange import LocalExchange
from towers.step.structures import RowComponents


def first(x):
    return x[:6]


def padded(x):
    return tf.concat([x, tf.zeros((12, 4), x.dtype)[tf.shape(x)[0] :]], 0)


def gradient_of_loop(x):
    """In its backward pass, the loop reads the sizes of its forward pass from lists."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        part = first(x)
        _, total = tf.while_loop(
            lambda i, s: i < 2,
            lambda i, s: (i + 1, s * s + tf.reduce_mean(part * part, 0)),
            (0, x),
        )
    return tape.gradient(total, x)


# What follows from a size: the size itself, numbers behind it, and a tensor that is made of it.
SIZES = {
    "rows of a slice": lambda x: tf.shape(first(x))[0],
    "elements of a slice": lambda x: tf.size(first(x)),
    "rows of two slices": lambda x: tf.shape(tf.concat([first(x), x[-3:]], 0))[0],
    "rows beside a slice": lambda x: tf.shape(tf.concat([first(x), x], 0))[0] - tf.shape(x)[0],
    "rows of a part of a flat one": lambda x: tf.shape(tf.reshape(x, [-1, 2])[:24])[0],
    "singular values": lambda x: tf.size(tf.linalg.svd(x, compute_uv=False)),
    "a diagonal": lambda x: tf.size(tf.linalg.diag_part(x)),
    "padded rows": lambda x: tf.shape(padded(x))[0],
    "numbers of the first rows": lambda x: tf.reduce_sum(tf.range(tf.shape(x)[0])[:6]),
    "ones for the first rows": lambda x: tf.reduce_sum(tf.ones([tf.shape(first(x))[0]])),
    "rows that an odd batch lacks": lambda x: tf.shape(tf.repeat(x[::2], 2, axis=0))[0],
    "a product of every second row": lambda x: tf.reduce_sum(
        tf.repeat(x[::2], 2, axis=0) @ tf.ones((4, 4), x.dtype)
    ),
    "a product of padded rows": lambda x: tf.reduce_sum(padded(x) @ tf.ones((4, 4), x.dtype)),
    "an axis": lambda x: tf.reverse(x, [tf.shape(x[:3])[0] - 2]),
    "a number of sizes": lambda x: tf.size(tf.ones(tf.range(1, tf.shape(x)[0] + 1)[:2])),
    "the mean of a slice": lambda x: tf.reduce_mean(first(x)),
    "the gradient of a loop": gradient_of_loop,
    "the state of a loop": lambda x: tf.shape(
        tf.while_loop(lambda i, s: i < 2, lambda i, s: (i + 1, s * s), (0, first(x)))[1]
    )[0],
}  # fmt: skip


def divided(make, *shapes):
    specs = [tf.TensorSpec(shape, tf.float64) for shape in shapes or [(None, 4)]]
    graph, _ = traced_graph(make, specs)
    machine = Machine([f"/cpu:{t}" for t in range(3)], LocalExchange(3))
    return Divided(graph, RowComponents(range(len(specs))), machine)


def test_a_value_that_equals_another_one_has_its_doubts():
    graph, _ = traced_graph(first, [tf.TensorSpec((None, 4), tf.float64)])
    (x,) = new_op("Placeholder", graph.inputs[0].op, [], graph.inputs).outputs
    ops, (part,) = flatten(graph, {id(graph.inputs[0]): x})
    (same,) = new_op("Identity", part.op.source, [part], graph.outputs).outputs
    probes = Probes()
    probes.feed_inputs([x], RowComponents([0]))
    probes.extend(ops)
    probes.alias(same, part)
    assert probes.dims(part) == probes.dims(same) == [(6, 6, 1, 6, 6), (4,) * 5]


def sizes(x):
    """All of them in one trace: tracing takes most of the time."""
    return [make(x) for make in SIZES.values()]


def test_a_size_is_that_of_the_batch_whatever_its_number_of_rows():
    step = tf.function(divided(sizes), autograph=False)
    for n in (13, 12, 7, 6, 5, 3, 2, 1):
        x = tf.constant(np.random.default_rng(n).normal(size=(n, 4)))
        for name, ours, theirs in zip(SIZES, step(x), sizes(x), strict=True):
            np.testing.assert_allclose(ours, theirs, 1e-12, err_msg=f"{name} of {n} rows")


def test_what_is_the_same_for_one_row_is_a_constant():
    """It is made where it is read, and towers need not meet for it."""
    found = divided(lambda x: tf.size(tf.reshape(x, [-1, 2, 2])[:1]) + tf.shape(tf.transpose(x))[0])
    assert [value.fact for value in found.outputs] == [SIZE]


def bounded(x):
    """A bound in code above the rows of the probes."""
    return [
        tf.reduce_mean(x[:30_000], 0), tf.shape(x[30_000:])[0], tf.reduce_sum(x[-30_000:] ** 2, 0),
    ]  # fmt: skip


def test_a_batch_may_have_more_rows_than_the_probes():
    step = tf.function(divided(bounded), autograph=False)
    for n in (7, 25_000, 40_000):
        x = tf.constant(np.random.default_rng(n).normal(size=(n, 4)))
        for ours, theirs in zip(step(x), bounded(x), strict=True):
            np.testing.assert_allclose(ours, theirs, 1e-12)


def lengths(x, w):
    """x: [n, T, 4]; w: [n, W]."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        mean = tf.reduce_mean(tf.sin(x)[:, :10], axis=1)
        last = tf.reduce_sum(tf.cos(x)[:, -10:], axis=1)
    windows = tf.reshape(x[..., 0], [-1, tf.shape(w)[1]])  # as long as w
    energy = tf.reduce_sum(windows, axis=1) ** 2
    return [
        tape.gradient([mean, last], x), tf.shape(x[:, :10])[1], tf.reduce_mean(energy),
        tf.reduce_sum(energy) / tf.cast(tf.shape(windows)[0], x.dtype),
    ]  # fmt: skip


def convolved(x, w):
    """Works for no less than three steps, and w is as long as x."""
    x = tf.nn.conv1d(x, tf.ones((3, 4, 2), x.dtype), 1, "VALID")
    return [tf.reduce_mean(x[:, :10], axis=1), tf.size(x[:, :5]), x * w[:, 2:, None]]


def test_a_size_is_that_of_the_batch_whatever_the_length_of_its_sequences():
    shapes = (None, None, 4), (None, None)
    for make, length_of_w in ((lengths, lambda t: t // 3), (convolved, lambda t: t)):
        step = tf.function(divided(make, *shapes), autograph=False)
        for n, t in ((7, 3), (5, 6), (7, 12), (2, 42)):
            rng = np.random.default_rng(t)
            x, w = (tf.constant(rng.normal(size=s)) for s in ((n, t, 4), (n, length_of_w(t))))
            for ours, theirs in zip(step(x, w), make(x, w), strict=True):
                np.testing.assert_allclose(ours, theirs, 1e-12)


def test_images_may_have_to_be_larger_than_all_short_sizes():
    def convolve(x):
        return tf.nn.conv2d(x, tf.ones((20, 26, 3, 2), x.dtype), 1, "VALID")

    step = tf.function(divided(convolve, (None, None, None, 3)), autograph=False)
    x = tf.constant(np.random.default_rng(0).normal(size=(5, 24, 30, 3)))
    np.testing.assert_allclose(step(x)[0], convolve(x), 1e-12)


def test_a_truncated_sequence_stays_in_the_towers():
    found = divided(lambda x: tf.sin(x)[:, :10] * 2, (None, None, 4))
    assert all(op.in_towers for op in found.ops)


def test_a_step_may_return_the_size_of_what_nothing_else_reads():
    step = tf.function(divided(lambda x: tf.size(x[:, 1:, 0]), (None, None, 4)), autograph=False)
    assert int(step(tf.zeros((7, 5, 4), tf.float64))[0]) == 28


def test_rows_padded_to_a_fixed_number_do_not_fix_the_batch():
    def pad_to_64(x):
        x = tf.pad(x, [[0, 64 - tf.shape(x)[0]], [0, 0]])
        x.set_shape([64, 4])
        return tf.reduce_sum(x @ tf.ones((4, 4), x.dtype))

    assert not divided(pad_to_64).fixed_batch
    for n in (1, 7, 12):  # 12 rows are a probe
        assert divided(lambda x, n=n: tf.reshape(x, [n, 4]) * 2).fixed_batch
