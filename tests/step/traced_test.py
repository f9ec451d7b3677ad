"""A step's graphs: traced once for a structure, fed from the CPU's memory."""

import numpy as np
import pytest
import tensorflow as tf

from towers.step.traced import TracedGraphs
from towers.workers.cluster import ALONE


def add(batch, placed):
    x, y, _ = batch
    total = tf.reduce_sum(x) if y is None else tf.reduce_sum(x) + tf.reduce_sum(y)
    return total if placed is None else tf.add_n([total, *(tf.reduce_sum(v) for (v,) in placed)])


@pytest.fixture(name="prepared")
def _prepared():
    return []


@pytest.fixture(name="graphs")
def _graphs(prepared):
    return TracedGraphs(
        {"add": add, "echo": lambda batch, placed: batch[:2]}, ALONE,
        lambda name, specs: prepared.append((name, specs)), lambda *batch: None,
    )


def ones(*shape):
    return np.ones(shape, "float32")


def test_a_structure_is_traced_once_and_prepared_whatever_the_number_of_rows(graphs, prepared):
    sums = [float(graphs.call("add", (ones(n, 2), None, None))) for n in (3, 1, 7)]
    assert (sums, len(graphs.traces)) == ([6, 2, 14], 1)
    assert prepared == [("add", (tf.TensorSpec([None, 2], tf.float32), None, None))]
    assert float(graphs.call("add", (ones(3, 2), ones(3), None))) == 9
    assert len(graphs.traces) == 2


def test_shards_behind_the_batch_have_a_graph_of_their_own(graphs):
    for shards, expected in (([1.0], [3.0]), 6), (([1.0], [0.0]), 3):
        placed = [(tf.constant(values),) for values in shards]
        assert float(graphs.call("add", (ones(2), None, None), placed)) == expected
        assert float(graphs.call("add", (ones(2), None, None))) == 2
    assert len(graphs.traces) == 2


class Echo:
    """In the place of a tf.function: its concrete functions return what they are called with."""

    def __init__(self, method, autograph):
        pass

    def get_concrete_function(self, *specs):
        return lambda batch, placed: batch


def test_arrays_lie_in_the_cpus_memory_whatever_the_default_device_and_tensors_where_they_are(
    graphs, monkeypatch
):
    """Else the first GPU would take a whole batch, which then came back to be split."""
    monkeypatch.setattr(tf, "function", Echo)
    with tf.device("/cpu:3"):  # a default device, as /gpu:0 is one
        placed = tf.identity(tf.ones([3], tf.float32))
        x, y, _ = graphs.call("echo", (ones(3, 2), placed, None))
    assert [x.device[-5:], y.device[-5:]] == ["CPU:0", "CPU:3"]


def test_a_batch_without_examples_is_an_error(graphs):
    with pytest.raises(ValueError, match="the global batch has no examples"):
        graphs.call("add", (ones(0, 2), None, None))


def test_a_graph_is_found_once_it_has_run(graphs):
    assert graphs.find("add") is None
    graphs.call("add", (ones(3, 2), None, None))
    assert any(node.op == "Sum" for node in graphs.find("add").node)
