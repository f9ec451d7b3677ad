"""Shards that lie on their devices before the step: where, in which order, the same bits."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from tests.step.small_step import make_step, partition_graphs, plain
from towers.machine.devices import CPU, GPU
from towers.divide.prefetch import place, prefetched


def batches(*counts):
    generator = np.random.default_rng(0)
    for count in counts:
        x = generator.normal(size=(count, 6)).astype("float32")
        yield tf.constant(x), tf.constant(generator.integers(0, 3, count, dtype="int32"))


def test_each_shard_ends_on_its_towers_device_and_no_copy_waits_for_another_devices():
    """2 tensors a tower, towers 0 and 1 at home: a device receives from it, and sends nothing."""
    step = make_step(3, layers=plain)
    x, y = tf.zeros([40, 6]), tf.zeros([40], tf.int32)
    nodes = [
        node
        for graph in partition_graphs(lambda: place(step.machine, ((x, y), y, None)))
        for node in graph.node
    ]
    ends = Counter(node.device[-5:] for node in nodes if node.op == "_Retval")
    assert ends == {"CPU:0": 2 * 3, "CPU:1": 3, "CPU:2": 3}
    links = Counter(
        (node.attr["send_device"].s[-5:], node.attr["recv_device"].s[-5:])
        for node in nodes
        if node.op == "_Send"
    )
    assert links == {(b"CPU:0", b"CPU:1"): 3, (b"CPU:0", b"CPU:2"): 3}
    assert not any(name.startswith("^") for node in nodes for name in node.input)


@pytest.mark.parametrize("policy", [CPU, GPU])
def test_shards_are_copied_ahead_where_the_policy_has_it_so_unless_asked_otherwise(policy):
    step = make_step(3, layers=plain, policy=policy)
    for to_devices, expected in ((None, policy is GPU), (False, False), (True, True)):
        (batch,) = prefetched(step, batches(8), to_devices=to_devices)
        assert (batch.placed is not None) is expected


def test_one_batch_is_taken_ahead_and_no_more():
    taken = []

    def counted():
        for index, batch in enumerate(batches(8, 8, 8, 8, 8)):
            taken.append(index)
            yield batch

    ahead = prefetched(make_step(3, layers=plain), counted(), to_devices=True)
    next(ahead)
    ahead.close()  # waits for the thread
    assert taken == [0, 1]


def test_an_error_of_the_input_comes_after_the_batches_before_it():
    def failing():
        yield from batches(8, 8)
        raise tf.errors.DataLossError(None, None, "the disk is broken")

    ahead = prefetched(make_step(3, layers=plain), failing(), to_devices=True)
    assert [next(ahead).x.shape[0] for _ in range(2)] == [8, 8]
    with pytest.raises(tf.errors.DataLossError, match="the disk is broken"):
        next(ahead)
