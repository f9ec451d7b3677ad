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


def test_a_tensor_is_local_where_any_of_its_sources_is(graph):
    dependence = Dependence()
    shard, weight = fed(dependence, True, 0), fed(dependence, False, 0)
    assert dependence.local(tf.square(shard) * weight)
    assert not dependence.local(tf.square(weight) + 1.0)


def test_a_level_is_the_highest_of_its_sources(graph):
    dependence = Dependence()
    early, late = fed(dependence, True, 1), fed(dependence, False, 3)
    assert dependence.level(early + 1.0) == 1
    assert dependence.level(early * late) == 3
    assert dependence.operation_level((early * late).op) == 3
    assert dependence.level(tf.constant(1.0)) == 0


def test_noise_is_a_towers_own(graph):
    dependence = Dependence()
    assert dependence.local(tf.random.normal([2]) + 1.0)
    assert not dependence.local(tf.random.stateless_normal([2], seed=[1, 2]))


def test_what_is_fed_is_known_by_what_it_was_told(graph):
    dependence = Dependence()
    met = tf.identity(fed(dependence, True, 0))
    assert not dependence.is_fed(met)
    dependence.feed(met, local=False, level=1)
    assert dependence.is_fed(met)
    assert (dependence.local(met + 1.0), dependence.level(met + 1.0)) == (False, 1)


def test_a_value_from_before_the_trace_is_everyones():
    value = tf.constant(1.0)
    with tf.Graph().as_default():
        assert not Dependence().local(value) and Dependence().level(value) == 0


def test_a_graph_may_be_deeper_than_pythons_stack(graph):
    dependence = Dependence()
    value = fed(dependence, True, 2)
    for _ in range(5000):
        value = tf.identity(value)
    assert dependence.level(value) == 2
