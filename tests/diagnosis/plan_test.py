"""The transfers of a step, counted by hand."""

import keras
import pytest
import tensorflow as tf

from towers.diagnosis import plan
from towers.step import TowerStep

X, Y = tf.TensorSpec([3], tf.float32), tf.TensorSpec([], tf.int32)


def make_step(num_towers, devices, with_state=False):
    layers = [keras.Input((3,)), keras.layers.Dense(5)]
    if with_state:
        layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    with tf.device("/cpu:0"):
        model = keras.Sequential(layers)
    return TowerStep(model, "sgd", "mse", devices=devices, num_towers=num_towers)


def test_the_parameters_device_moves_nothing_and_the_others_each_their_part():
    here, there = plan.traffic(make_step(2, ["/cpu:0", "/cpu:1"]), 7, X, Y)
    assert here == ("/cpu:0", (0, 0), [4], 0, 0, 0, 0)
    parameters = (3 * 5 + 5) * 4
    assert there == ("/cpu:1", (1, 1), [3], parameters, 3 * (3 * 4 + 4), parameters, 3 * 5 * 4)


def test_state_goes_down_and_only_sums_and_tower_0s_seeds_come_back():
    devices = ["/cpu:1", "/cpu:2"]
    first, second = plan.traffic(make_step(2, devices, with_state=True), 8, X, Y)
    trained, statistics, seeds = (3 * 5 + 5 + 5 + 5) * 4, (5 + 5) * 4, 2 * 8
    assert first.parameters == second.parameters == trained + statistics + seeds
    assert second.gradients == trained + statistics
    assert first.gradients == trained + statistics + seeds


@pytest.mark.parametrize(
    ("num_towers", "devices", "sums"),
    [
        (4, ["/cpu:1", "/cpu:2"], [1, 1]),  # ((0 1) (2 3))
        (6, ["/cpu:1", "/cpu:2"], [1, 1]),  # (((0 1) 2) ((3 4) 5))
        (6, ["/cpu:1", "/cpu:2", "/cpu:3"], [1, 2, 2]),  # 2 and (3 4 5) leave the second
    ],
)
def test_sums_leave_a_device_for_that_of_the_left_child_or_home(num_towers, devices, sums):
    rows = plan.traffic(make_step(num_towers, devices), 12, X, Y)
    assert [row.gradients // (20 * 4) for row in rows] == sums


def test_the_table_lines_up_and_adds_up():
    rows = plan.traffic(make_step(3, ["/cpu:0", "/cpu:1"]), 8, X, Y)
    assert plan.table(rows) == [
        "device  towers  examples  parameters in  examples in  gradients out  predictions out",
        "/cpu:0  0-1     2 x 3     -              -            -              -",
        "/cpu:1  2       2         80 bytes       32 bytes     80 bytes       40 bytes",
        "Each step moves 112 bytes to the devices and 120 bytes back.",
    ]
