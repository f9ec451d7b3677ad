"""Walks through a graph."""

import tensorflow as tf

from towers.graph.levels import Dependence, StageLevels
from towers.graph.rows import Rows


def test_a_graph_may_be_deeper_than_pythons_stack():
    with tf.Graph().as_default():
        x = value = tf.compat.v1.placeholder(tf.float32, [None, 3])
        for _ in range(3000):
            value = value + 1.0
        for dependence in (Dependence(), StageLevels(3)):
            dependence.feed(x, local=True, level=2)
            assert dependence.level(value) == 2 and dependence.local(value, but_sizes=True)
        assert Rows.of_shard([x]).kind(tf.reduce_mean(value)).name == "mean"
