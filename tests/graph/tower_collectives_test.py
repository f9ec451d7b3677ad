"""Where the towers of a traced function meet; that they then do: the tests of what runs it."""

import pytest
import tensorflow as tf

from towers.graph.tower_collectives import TowerCollectives


@pytest.fixture(name="value")
def _value():
    with tf.Graph().as_default():
        yield tf.compat.v1.placeholder(tf.float32, [None])


def test_what_comes_of_a_meeting_is_a_level_later_and_no_towers_own(value):
    collectives = TowerCollectives([value])
    (total,) = collectives.sum([tf.reduce_sum(value)])
    facts = collectives.dependence
    assert (facts.level(value), facts.local(value)) == (0, True)
    assert (facts.level(total + 1.0), facts.local(total + 1.0)) == (1, False)
    assert facts.level(tf.square(value) * total) == 1


def test_the_gradient_of_a_sum_is_a_sum(value):
    collectives = TowerCollectives([value])
    with tf.GradientTape() as tape:
        tape.watch(value)
        (total,) = collectives.sum([tf.reduce_sum(value)])
        loss = tf.square(total)
    assert collectives.dependence.level(tape.gradient(loss, value)) == 2
    assert [(m.how, m.level) for m in collectives.events] == [("sum", 0), ("sum", 1)]


def test_towers_cannot_meet_in_a_loop(value):
    collectives = TowerCollectives([value])
    with pytest.raises(ValueError, match="tower_collectives_test.py:.* towers cannot meet"):
        tf.while_loop(lambda x: True, lambda x: collectives.sum([x])[0], [tf.constant(1.0)])
