"""The last two arrows: the additions that are left, and one update."""

import hashlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import forked
from tests.real_workers import ROOT
from towers.machine.devices import count_cores
from towers.step import averaging
from towers.step.update import update


def variables_and_optimizer(optimizer, shape=(2,)):
    """Of the variables, the first is [1, 2]."""
    variables = [keras.Variable(np.arange(1, 1 + np.prod(shape)).reshape(shape), dtype="float32"),
                 keras.Variable(np.zeros([1]), dtype="float32")]
    optimizer.build(variables)
    return variables, optimizer


def of_tower(loss, first, second, statistic):
    return [tf.constant(v) for v in (loss, first, second, statistic)]


@pytest.fixture
def tree():
    """Three towers, (0 + 1) + 2: loss 7; gradients [6, 8] and [3]; a statistic 111."""
    return (
        (of_tower(1.0, [1.0, 2.0], [1.0], 1.0), of_tower(2.0, [2.0, 2.0], [1.0], 10.0)),
        of_tower(4.0, [3.0, 4.0], [1.0], 100.0),
    )


@pytest.mark.parametrize("is_added", [False, True])
def test_the_update_is_one_compiled_program_with_what_is_left_to_add(tree, is_added):
    variables, optimizer = variables_and_optimizer(keras.optimizers.SGD(1.0))

    @tf.function(autograph=False)
    def run():
        return update(averaging.add_tree(tree) if is_added else tree, optimizer, variables)[0]

    operations = run.get_concrete_function().graph.get_operations()
    (call,) = [op for op in operations if "PartitionedCall" in op.type]
    assert "_update_program_" in call.get_attr("f").name
    assert call.get_attr("_XlaMustCompile")


def test_a_variable_on_another_device_is_read_where_it_is(tree):
    """TensorFlow's own, such as a rate that a callback assigns."""
    with tf.device("/cpu:3"):
        rate = tf.Variable(0.5)
    variables, optimizer = variables_and_optimizer(keras.optimizers.SGD(lambda: rate))

    @tf.function
    def step():
        with tf.device("/cpu:0"):
            update(tree, optimizer, variables)

    for value in (0.5, 0.25):
        rate.assign(value)
        step()
    assert variables[1].numpy().tolist() == [-0.5 * 3 - 0.25 * 3]


def large_update():
    """Updates 3 million parameters by clipped gradients.

    Returns: a digest of them, and the parts that XLA cuts the loop over the largest into.
    """
    rng = np.random.default_rng(0)
    variables, optimizer = variables_and_optimizer(
        keras.optimizers.Adam(0.1, global_clipnorm=1.0), (3000, 1000)
    )
    towers = [
        [tf.zeros([]), *(tf.constant(rng.normal(size=v.shape), tf.float32) for v in variables)]
        for _ in range(2)
    ]

    @tf.function(autograph=False, jit_compile=True)
    def run():
        return update(tuple(towers), optimizer, variables)[0]

    for _ in range(3):
        run()
    compiled = run.experimental_get_compiler_ir()(stage="optimized_hlo")
    parts = re.findall(r'outer_dimension_partitions":\["(\d+)"', compiled)
    values = b"".join(v.numpy().tobytes() for v in [*variables, *optimizer.variables])
    return hashlib.sha256(values).hexdigest(), max(map(int, parts), default=1)


@pytest.mark.skipif(count_cores() < 2, reason="one core has no loop to share")
def test_the_program_is_cut_among_tensorflows_threads_and_its_bits_stay():
    command = (
        "import tensorflow as tf; tf.config.threading.set_intra_op_parallelism_threads(2); "
        "from tests.step.update_test import large_update; print(*large_update())"
    )
    done = forked.run("-c", command, cwd=ROOT)
    alone, one = large_update()  # the tests' threads: one
    assert one == 1 and done.stdout.split() == [alone, "2"], done.stderr[-2000:]
