"""What each tensor of a traced step depends on."""

import pytest
import tensorflow as tf

from towers.graph.dependence import Dependence


@pytest.fixture(name="graph")
def _graph():
    with tf.Graph().as_default() as graph:
        yield graph


def fed(dependence, local, level):
    tensor = tf.compat.v1.placeholder(tf.float32, [None])
    dependence.feed(tensor, local=local, level=level)
    return tensor


def test_noise_is_a_towers_own(graph):
    dependence = Dependence()
    assert dependence.local(tf.random.normal([2]) + 1.0)
    assert not dependence.local(tf.random.stateless_normal([2], seed=[1, 2]))


def test_a_graph_may_be_deeper_than_pythons_stack(graph):
    dependence = Dependence()
    value = fed(dependence, True, 2)
    for _ in range(5000):
        value = tf.identity(value)
    assert dependence.level(value) == 2
