"""What the tests of the rows' facts share: expressions of rows, and what they are found to be."""

import tensorflow as tf

from towers.graph.rows import Rows


def kind_of(make):
    """The `Kind` of what make(x) makes of a shard's rows x, [n, 3] of float32, in a function."""
    found = []

    def body(x):
        value = tf.convert_to_tensor(make(x))
        found.append(Rows.of_shard([x]).kind(tf.cast(value, tf.float32)))
        return value

    tf.function(body, autograph=False).get_concrete_function(tf.TensorSpec([None, 3]))
    return found[-1]


def count(x):
    """The number of a shard's rows."""
    return tf.cast(tf.shape(x)[0], x.dtype)


def positive(x):
    """A mask of the rows."""
    return x[:, 0] > 0
