"""A tower cut into levels returns what the whole function would, which tower_test runs."""

import numpy as np
import pytest
import tensorflow as tf

from towers.graph.cut import Segment
from towers.machine.tensorflow_internals import KEEP_WHOLE
from towers.step.traced_tower import run_levels, trace_tower

OPTIONS = {"experimental_attributes": KEEP_WHOLE}
DEVICES = ["/cpu:0", "/cpu:0", "/cpu:1"]
VECTOR, SCALAR = tf.TensorSpec([None]), tf.TensorSpec([])


def added(values):
    return [tf.add_n(each) for each in zip(*values, strict=True)]


def run(method, specs, arguments, take_turns=False):
    """What the towers return."""
    tower = trace_tower(method, specs, OPTIONS, meets=True)

    @tf.function(autograph=False)
    def run_all(fed):
        return tower.run(fed, DEVICES, added, take_turns=take_turns)

    return run_all(arguments)


@pytest.mark.parametrize("take_turns", [False, True])
def test_each_tower_has_its_own_values_and_the_sums_of_all(take_turns):
    def center(shard, factor, sum_towers):
        x = shard["x"]
        total, count = sum_towers([tf.reduce_sum(x), tf.reduce_sum(tf.ones_like(x))])
        (spread,) = sum_towers([tf.reduce_sum((x - total / count) ** 2)])
        return {"spread": spread / count, "own": x * factor, "none": None, "y": shard["y"]}

    rows = [np.float32(v) for v in ([1, 2, 4], [5], [6, 0])]
    arguments = [({"y": tf.constant(float(t)), "x": tf.constant(v)}, tf.constant(2.0))
                 for t, v in enumerate(rows)]
    results = run(center, [{"x": VECTOR, "y": SCALAR}, SCALAR], arguments, take_turns)
    for t, (result, own) in enumerate(zip(results, rows, strict=True)):
        np.testing.assert_allclose(result["spread"], np.var(np.concatenate(rows)), rtol=1e-6)
        np.testing.assert_array_equal(result["own"], own * 2)
        assert result["none"] is None and float(result["y"]) == t


def test_what_is_taken_from_outside_and_sparse_gradients_come_through():
    table = tf.constant([[1.0], [2.0], [3.0]])

    def look_up(rows, parameter, sum_towers):
        with tf.GradientTape() as tape:
            tape.watch(parameter)
            (total,) = sum_towers([tf.reduce_sum(tf.gather(parameter, rows))])
            loss = tf.reduce_sum(tf.gather(table, rows)) * total
        return tape.gradient(loss, parameter)

    specs = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([3])]
    parameter = tf.constant([1.0, 10.0, 100.0])
    arguments = [(tf.constant(rows), parameter) for rows in ([0], [1, 2], [2])]
    gradients = run(look_up, specs, arguments)
    assert all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    dense = [tf.convert_to_tensor(gradient).numpy().tolist() for gradient in gradients]
    assert dense == [[9, 0, 0], [0, 9, 9], [0, 0, 9]]  # 1 + (2 + 3) + 3 in front of each


def test_an_assertion_of_a_tower_holds():
    def check(x, sum_towers):
        tf.debugging.assert_positive(x, "x must be positive")
        return sum_towers([tf.reduce_sum(x)])

    assert float(run(check, [VECTOR], [(tf.constant([1.0]),)] * 3)[0][0]) == 3
    with pytest.raises(tf.errors.OpError):
        run(check, [VECTOR], [(tf.constant([v]),) for v in (1.0, -1.0, 2.0)])


def test_a_level_gives_each_tower_its_own_results_by_their_names_before_its_end():
    segment = Segment(["a", "b"], ["sum"], lambda tower: lambda a, b: [a + b])
    numbers = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    towers = [{name: tf.constant(number) for name, number in each.items()} for each in numbers]
    ends = []
    run_levels(
        {1: segment}, 3, towers, ["/cpu:0", "/cpu:1"],
        lambda level: ends.append((level, [int(tower.get("sum", 0)) for tower in towers])),
        take_turns=False,
    )
    assert ends == [(0, [0, 0]), (1, [3, 7]), (2, [3, 7])]
