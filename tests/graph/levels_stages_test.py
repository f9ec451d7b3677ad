"""The stage of each operation of a traced function."""

import pytest
import tensorflow as tf

from towers.graph.levels import StageLevels, stage_scope


@pytest.fixture(name="graph")
def _graph():
    with tf.Graph().as_default() as graph:
        yield graph


def fed(*stages):
    """Placeholders [None] of these stages, and the levels of a function of 3 stages of them."""
    tensors = [tf.compat.v1.placeholder(tf.float32, [None]) for _ in stages]
    names = [v.name for v in tensors]
    return *tensors, StageLevels(3, dict(zip(names, stages, strict=True)))


def test_a_layer_runs_in_its_stage_forward_and_backward(graph):
    x, levels = fed(0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with tf.name_scope(stage_scope(0)):
            first = tf.sin(x)
        with tf.name_scope(stage_scope(1)):
            second = tf.exp(first)
    gradient = tape.gradient(second, x)
    assert [levels.level(v) for v in (first, second, gradient)] == [0, 1, 4]
    assert [levels.stage(n) for n in range(5)] == [0, 1, 2, 1, 0]


def test_a_regularizers_gradient_is_with_its_parameter(graph):
    parameter, levels = fed(1)
    with tf.GradientTape() as tape:
        tape.watch(parameter)
        loss = tf.reduce_sum(tf.square(parameter))
    assert levels.level(loss) == 1
    assert levels.level(tape.gradient(loss, parameter)) == 3
