"""A step's graphs: traced once for a structure, fed from the CPU's memory."""

import numpy as np
import pytest
import tensorflow as tf

from towers.workers.cluster import ALONE
from towers.step.traced import TracedGraphs


class Method:
    """Notes how often it is traced; returns the sum of all but None."""

    def __init__(self):
        self.traces = 0

    def add(self, x, y):
        self.traces += 1
        return tf.reduce_sum(x) if y is None else tf.reduce_sum(x) + tf.reduce_sum(y)


def test_a_structure_is_traced_once_whatever_the_number_of_rows():
    method, graphs = Method(), TracedGraphs(ALONE, lambda: None, lambda *batch: None)
    sums = [float(graphs.call(method.add, np.ones([n, 2], "float32"), None)) for n in (3, 1, 7)]
    assert (sums, method.traces) == ([6, 2, 14], 1)
    assert float(graphs.call(method.add, np.ones([3, 2], "float32"), np.ones([3], "float32"))) == 9
    assert method.traces == 2


def test_a_trace_is_prepared_with_the_specs_of_the_batch():
    seen = []
    TracedGraphs(ALONE, lambda: None, lambda *batch: None).call(
        Method().add, np.ones([3, 2], "float32"), None, prepare=lambda *specs: seen.append(specs)
    )
    assert seen == [(tf.TensorSpec([None, 2], tf.float32), None)]


class Echo:
    """In the place of a tf.function: its concrete functions return what they are called with."""

    def __init__(self, method, autograph):
        pass

    def get_concrete_function(self, *specs):
        return lambda *tensors: tensors


def test_arrays_lie_in_the_cpus_memory_whatever_the_default_device_and_tensors_where_they_are(
    monkeypatch
):
    """Else the first GPU would take a whole batch, which then came back to be split."""
    monkeypatch.setattr(tf, "function", Echo)
    with tf.device("/cpu:3"):  # a default device, as /gpu:0 is one
        placed = tf.identity(tf.ones([3], tf.float32))
        x, y = TracedGraphs(ALONE, lambda: None, lambda *batch: None).call(
            Method().add, np.ones([3, 2], "float32"), placed
        )
    assert [x.device[-5:], y.device[-5:]] == ["CPU:0", "CPU:3"]


def test_a_batch_without_examples_is_an_error():
    with pytest.raises(ValueError, match="the global batch has no examples"):
        TracedGraphs(ALONE, lambda: None, lambda *batch: None).call(
            Method().add, np.ones([0, 2], "float32"), None
        )


def test_a_graph_is_found_once_it_has_run():
    method, graphs = Method(), TracedGraphs(ALONE, lambda: None, lambda *batch: None)
    assert graphs.find(method.add) is None
    graphs.call(method.add, np.ones([3, 2], "float32"), None)
    assert any(node.op == "Sum" for node in graphs.find(method.add).node)


def test_what_comes_behind_the_batch_is_none_or_has_a_graph_of_its_own():
    def add(x, placed):
        return x if placed is None else tf.add_n([x, *(values for (values,) in placed)])

    graphs, x = TracedGraphs(ALONE, lambda: None, lambda *batch: None), np.ones(2, "float32")
    for shards, expected in ([[1.0, 2.0], [3.0, 4.0]], [5, 7]), ([[1.0, 1.0], [0.0, 1.0]], [2, 3]):
        placed = [(tf.constant(values),) for values in shards]
        assert graphs.call(add, x, behind=[placed]).numpy().tolist() == expected
        assert graphs.call(add, x, behind=[None]).numpy().tolist() == [1, 1]
    assert len(graphs.traces) == 2
