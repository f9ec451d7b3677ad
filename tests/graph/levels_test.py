"""What each tensor of a traced step depends on, and the stage of each operation."""

import sys

import pytest
import tensorflow as tf

from towers.graph.levels import Dependence, StageLevels
from towers.graph.rows import Rows


@pytest.fixture(autouse=True)
def _graph():
    with tf.Graph().as_default():
        yield


def test_noise_is_a_towers_own():
    dependence = Dependence()
    assert dependence.local(tf.random.normal([2]) + 1.0)
    assert not dependence.local(tf.random.stateless_normal([2], seed=[1, 2]))


def fed(stage):
    """A placeholder [None] of this stage, and the levels of a function of 3 stages of it."""
    tensor, levels = tf.compat.v1.placeholder(tf.float32, [None]), StageLevels(3)
    levels.feed(tensor, local=True, level=stage)
    return tensor, levels


def test_a_layer_runs_in_its_stage_forward_and_backward():
    x, levels = fed(0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with tf.name_scope("stage_0"):
            first = tf.sin(x)
        with tf.name_scope("stage_1"):
            second = tf.exp(first)
    gradient = tape.gradient(second, x)
    assert [levels.level(v) for v in (first, second, gradient)] == [0, 1, 4]


def test_a_regularizers_gradient_is_with_its_parameter():
    parameter, levels = fed(1)
    with tf.GradientTape() as tape:
        tape.watch(parameter)
        loss = tf.reduce_sum(tf.square(parameter))
    assert levels.level(loss) == 1
    assert levels.level(tape.gradient(loss, parameter)) == 3


def test_a_graph_may_be_deeper_than_pythons_stack():
    with tf.Graph().as_default():
        x = value = tf.compat.v1.placeholder(tf.float32, [None, 3])
        for _ in range(sys.getrecursionlimit() + 100):
            value = value + 1.0
        for dependence in (Dependence(), StageLevels(3)):
            dependence.feed(x, local=True, level=2)
            assert dependence.level(value) == 2 and dependence.local(value, but_sizes=True)
        assert Rows.of_shard([x]).kind(tf.reduce_mean(value)).name == "mean"
