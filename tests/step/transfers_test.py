"""Values arrive as they left; policy_test counts what devices send."""

import numpy as np
import tensorflow as tf

from towers.step.transfers import transfer


def test_a_move_packs_the_tensors_of_a_dtype_and_keeps_every_value():
    """The bits of not a number, of -infinity, of -0 and of the smallest numbers, too."""
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    odd = np.array([[0x7FC00001, 0xFF800000, 0x80000000, 1]], np.uint32).view(np.float32)
    values = [tf.constant(odd), tf.constant(7), None, tf.constant(3.5), slices]

    @tf.function
    def moved():
        arrived = transfer(values, "/cpu:0", "/cpu:1", packed=True)
        return [v for v in arrived if isinstance(v, tf.Tensor)]

    for got, wanted in zip(moved(), [values[0], values[1], values[3]], strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert got.numpy().tobytes() == wanted.numpy().tobytes()
    assert transfer(values, "/cpu:0", "/cpu:1", packed=True)[4] is slices
    operations = moved.get_concrete_function().graph.get_operations()
    assert sum(op.type == "ConcatV2" for op in operations) == 1  # of the two float32
