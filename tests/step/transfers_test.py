"""Values move from device to device as one vector a dtype, and arrive as they left."""

import numpy as np
import pytest
import tensorflow as tf

from tests.step.partitions import partition_graphs
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


@pytest.mark.parametrize("packed, transfers", [(True, 2), (False, 5)])
def test_what_a_device_receives_is_one_tensor_a_dtype(packed, transfers):
    """Three float32 and two int32, computed on one device and needed on another."""
    x = tf.Variable(tf.ones([3]))

    @tf.function(autograph=False)
    def run():
        with tf.device("/cpu:1"):
            values = [x * n for n in (2.0, 3.0, 5.0)]
            values += [tf.cast(x, tf.int32) * n for n in (7, 11)]
        moved = transfer(values, "/cpu:1", "/cpu:2", packed=packed)
        with tf.device("/cpu:2"):
            return [v + 1 for v in moved]

    results = []
    graphs = partition_graphs(lambda: results.extend(run()))
    assert [r.numpy()[0] for r in results] == [3, 4, 6, 8, 12]
    received = [node.attr["tensor_name"].s for graph in graphs for node in graph.node
                if node.op == "_Recv" and "CPU:2" in node.device
                and b"CPU:1" in node.attr["send_device"].s]
    assert len(received) == transfers
