"""What each tensor of a traced step depends on."""

import tensorflow as tf

from towers.graph.levels import Dependence


def test_noise_is_a_towers_own():
    with tf.Graph().as_default():
        dependence = Dependence()
        assert dependence.local(tf.random.normal([2]) + 1.0)
        assert not dependence.local(tf.random.stateless_normal([2], seed=[1, 2]))
