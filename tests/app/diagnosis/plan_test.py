"""The transfers of a step, counted by hand."""

import dataclasses

import keras
import pytest
import tensorflow as tf

from towers.app.diagnosis import plan
from towers.machine.devices import short_name
from towers.machine.policy import GPU
from towers.step import TowerStep

Y5 = tf.TensorSpec([5], tf.float32)
X, Y = tf.TensorSpec([3], tf.float32), tf.TensorSpec([], tf.int32)


def make_step(num_towers, devices, with_state=False, **options):
    layers = [keras.Input((3,)), keras.layers.Dense(5)]
    if with_state:
        layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    with tf.device("/cpu:0"):
        model = keras.Sequential(layers)
    return TowerStep(model, "sgd", "mse", devices=devices, num_towers=num_towers, **options)


def test_the_parameters_device_moves_nothing_and_the_others_each_their_part():
    here, there = plan.traffic(make_step(2, ["/cpu:0", "/cpu:1"]), 7, X, Y)
    assert here == ("/cpu:0", (0, 0), [4], 0, 0, 0, 0, 0, 0)
    parameters = (3 * 5 + 5) * 4
    moved = parameters, 3 * (3 * 4 + 4), parameters, 3 * 5 * 4
    # in: kernel and bias as one, the loss scale, x and y, the shares of outputs and examples; out:
    # the sums of the loss, of kernel and bias as one, and the predictions
    assert there == ("/cpu:1", (1, 1), [3], *moved, 1 + 1 + 2 + 2, 1 + 1)


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
        "device  towers  examples  parameters in  examples in  gradients out  predictions out  "
        "sends in  sends out",
        "/cpu:0  0-1     2 x 3     -              -            -              -                "
        "0         0",
        "/cpu:1  2       2         80 bytes       32 bytes     80 bytes       40 bytes         "
        "6         2",
        "Each step moves 112 bytes to the devices and 120 bytes back.",
    ]


def crossings(step, batch_size, x, y):
    """{device: [sends in, sends out]}, read from the graph of an update with predictions."""
    specs = [tf.TensorSpec([batch_size, *spec.shape], spec.dtype) for spec in (x, y)]
    graph = tf.function(step.train_graph).get_concrete_function(*specs, None).graph

    variables = {captured.name: given.device for given, captured in graph.captures}

    def place(operation):  # a variable's value is read where the variable is
        of_value = operation.type == "ReadVariableOp"
        device = variables[operation.inputs[0].name] if of_value else operation.device
        return device and short_name(device)

    # where devices have no copies, a sum is counted where it leaves
    sources = step.devices if step.strategy.num_copies else [step.home]

    found = {
        (tensor.name, place(tensor.op), place(operation))
        for operation in graph.get_operations() for tensor in operation.inputs
        if tensor.dtype != tf.resource and operation.device
    }
    return {
        device: [sum(device == target != source in sources for _, source, target in found),
                 sum(device == source != target for _, source, target in found)]
        for device in step.devices
    }


@pytest.mark.parametrize("packs", [True, False])
def test_the_sends_are_those_of_the_graph(packs):
    devices = ["/cpu:1", "/cpu:2", "/cpu:3"]
    policy = dataclasses.replace(GPU, pack_transfers=packs)
    step = make_step(6, devices, with_state=True, policy=policy)
    rows = plan.traffic(step, 12, X, Y5)
    assert {row.device: [row.sends_in, row.sends_out] for row in rows} == crossings(step, 12, X, Y5)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("num_towers, count", [(8, 3), (4, 4)])
def test_with_copies_the_sends_are_those_of_slices(num_towers, count, packs):
    """Into each of 4 devices: state, and 1.5 models, 3 slices of gradients and 3 of sums."""
    devices = [f"/cpu:{i}" for i in range(count)]
    options = {"policy": dataclasses.replace(GPU, pack_transfers=packs), "strategy": "mirrored"}
    step = make_step(num_towers, devices, with_state=True, **options)
    rows = plan.traffic(step, 24, X, Y5)
    found = crossings(step, 24, X, Y5)
    for row in rows[1:]:  # what home sends beside slices is counted where it arrives
        assert [row.sends_in, row.sends_out] == found[row.device]
    if count == 4:
        numbers = 1 + 15 + 5 * 5  # loss, kernel, bias, gamma, beta, two statistics: slices of 11
        state = 2 * 5 * 4 + 2 * 8  # mean and variance, a seed of two int64
        assert [row.parameters for row in rows[1:]] == [6 * -(-numbers // 4) * 4 + state] * 3


@pytest.mark.matrix
def test_resnet50_sends_fewer_than_100_tensors_a_device():
    with tf.device("/cpu:0"):
        model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)
    x = tf.TensorSpec([32, 32, 3])
    devices = [f"/cpu:{i}" for i in range(1, 5)]
    step = TowerStep(
        model, "adam", "sparse_categorical_crossentropy", devices=devices, policy=GPU
    )
    found = crossings(step, 64, x, Y)
    assert max(map(sum, found.values())) < 100
    rows = plan.traffic(step, 64, x, Y)
    assert {row.device: [row.sends_in, row.sends_out] for row in rows} == found
