"""What each policy makes of a step: read from the traced graph, from TensorFlow's partitions of it,
and timed. No tower waits for one on another device, whatever the options."""

import dataclasses
import functools
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.bits import bits
from tests.step import small_step
from tests.step.small_step import batch, called_in_towers, partition_graphs
from towers.machine.devices import CPU, GPU, REHEARSAL
from towers.divide.prefetch import place

L = keras.layers
HOME, DEVICES = "/cpu:0", ["/cpu:1", "/cpu:2", "/cpu:3"]  # no tower at home: its traffic shows
NUM_TOWERS = 6
PLAIN = ()
SUMS = 10  # of the loss, for the update and for its mean, six gradients and two statistics
TURNS = {(1, 0), (3, 2), (5, 4)}  # two towers a device
OPTIONS = [
    PLAIN,
    (("jit_compile", True),),
    (("nonfinite", "skip"),),
    (("add_on", "cpu"), ("batch_norm", "synchronized")),
]
UNPACKED = dataclasses.replace(GPU, pack_transfers=False)


def make_step(policy, **options):
    options = {"batch_norm": "average", **options}  # with which towers meet once
    return small_step.make_step(devices=DEVICES, num_towers=NUM_TOWERS, policy=policy, **options)


@functools.cache
def graphs_of(policy, options, placed):
    """An update as it is traced, and what TensorFlow makes of that for each device."""
    step = make_step(policy, **dict(options))
    x, y = (tf.constant(part) for part in batch(24))
    shards = place(step.machine, (x, y, None)) if placed else None
    partitions = partition_graphs(lambda: step.train_batch(x, y, placed=shards))
    return step.traces[-1].graph, partitions


def tower_calls(graph, scope=""):
    """The calls of towers 0, 1, ... in a traced graph."""
    found = {}
    for operation in graph.get_operations():
        match = re.match(rf"{scope}tower_(\d+)/", operation.name)
        if match and ("PartitionedCall" in operation.type or operation.type.endswith("If")):
            found[int(match[1])] = operation
    return [found[tower] for tower in range(len(found))]


def turns(graph, scope=""):
    """{(t, s)}: the call of tower t waits, over data or control edges, for that of tower s."""
    calls, found = tower_calls(graph, scope), set()
    for t, call in enumerate(calls):
        needed, left = set(), [call]
        while left:
            last = left.pop()
            left += {*last.control_inputs, *(tensor.op for tensor in last.inputs)} - needed
            needed.update(left)
        found |= {(t, s) for s, other in enumerate(calls) if other in needed}
    return found


@pytest.mark.telling("gpu-()", "cpu-()")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("policy, expected", [(GPU, TURNS), (CPU, set())], ids=["gpu", "cpu"])
def test_a_tower_waits_only_for_the_previous_one_on_its_device(policy, expected, options):
    assert turns(graphs_of(policy, options, True)[0]) == expected


def test_towers_of_evaluation_and_prediction_take_turns_too():
    step = make_step(GPU, layers=small_step.plain)
    x, y = batch(24)
    for method in (lambda: step.test_batch(x, y), lambda: step.predict_batch(x)):
        method()
        assert turns(step.traces[-1].graph) == TURNS


@pytest.mark.telling("()-True", "*add_on*-True")
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_is_sent_from_one_towers_device_to_anothers_but_sums(options, placed):
    """Optimized, as it runs: control edges between devices are transfers there."""
    sent = {
        (node.attr["send_device"].s.decode()[-5:], node.attr["recv_device"].s.decode()[-5:])
        for graph in graphs_of(GPU, options, placed)[1]
        for node in graph.node
        if node.op in ("_Recv", "_HostRecv")
    }
    assert {("CPU:0", f"CPU:{i}") for i in (1, 2, 3)} <= sent
    sums = {("CPU:2", "CPU:1"), ("CPU:3", "CPU:2")}  # to the device of the left child
    if ("add_on", "cpu") in options:
        sums = set()
    assert {(a, b) for a, b in sent if a != b and "CPU:0" not in (a, b)} == sums


@pytest.mark.telling("()")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_operation_is_left_without_a_device(options):
    """On a machine with GPUs TensorFlow would put it on the first one, with all that it reads."""
    graph = graphs_of(GPU, options, True)[0]
    follows_its_input = ("Placeholder", "ReadVariableOp", "NoOp", "Const")
    returned = {tensor.op for tensor in graph.outputs}
    assert not [
        operation.name
        for operation in graph.get_operations()
        if not operation.device
        and operation.type not in follows_its_input
        and operation not in returned
    ]


@pytest.mark.telling("packed")
@pytest.mark.parametrize("policy, sends", [(UNPACKED, SUMS), (GPU, 1)], ids=["unpacked", "packed"])
def test_one_sum_of_each_value_reaches_the_parameters_device(policy, sends):
    senders = [
        node.attr["send_device"].s.decode()[-5:]
        for graph in graphs_of(policy, PLAIN, True)[1]
        for node in graph.node
        if node.op == "_Recv"
        and node.device.endswith("CPU:0")
        and "_sum/" in node.attr["tensor_name"].s.decode()
    ]
    assert senders == ["CPU:1"] * sends


@functools.cache
def trained(policy):
    """The bits of all variables after steps of several sizes, prefetched as the policy has it."""
    step = make_step(policy, optimizer="adam", batch_norm="synchronized")
    rows = [tuple(map(tf.constant, batch(count))) for count in (24, 7, 3)]
    for x, y, placed in towers.prefetched(step, rows):
        step.train_batch(x, y, placed=placed)
    return [bits(v) for v in [*step.model.variables, *step.optimizer.variables]]


@pytest.mark.telling("add_on_devices", "pack_transfers")
@pytest.mark.parametrize(
    "off", ["take_turns", "add_on_devices", "prefetch_to_devices", "pack_transfers"]
)
def test_no_optimization_changes_a_bit(off):
    assert trained(dataclasses.replace(GPU, **{off: False})) == trained(GPU)


@pytest.mark.parametrize("policy", [GPU, CPU], ids=["gpu", "cpu"])
def test_grapplers_arithmetic_is_off_and_the_rest_of_it_as_the_policy_has_it(policy):
    make_step(policy)
    options = tf.config.optimizer.get_experimental_options()
    assert options["arithmetic_optimization"] is False
    assert options["disable_meta_optimizer"] is not policy.optimize_graphs


class Pauses(L.Layer):
    def call(self, x):
        return tf.raw_ops.Snapshot(input=x)


def pauses(devices, num_towers, policy=None):
    """When each tower pauses, in a step after the first: (begin, end)."""
    spans = {}  # by the first number of the tower's rows

    def pause(rows):
        begin = time.perf_counter()
        time.sleep(0.2)
        spans[int(rows[0, 0])] = begin, time.perf_counter()
        return rows

    with tf.device(HOME):
        model = keras.Sequential([keras.Input((1,)), Pauses(), L.Dense(1)])
    step = towers.TowerStep(
        model,
        "sgd",
        "mse",
        devices=devices,
        num_towers=num_towers,
        policy=policy,
        jit_compile=False,
    )
    x = np.arange(num_towers, dtype="float32")[:, None]
    with called_in_towers(pause):
        for _ in range(2):
            float(step(x, x)["loss"])
    return [spans[tower] for tower in range(num_towers)]


@pytest.mark.telling("policy1-4")
@pytest.mark.parametrize("policy, num_towers", [(CPU, 2), (GPU, 4)])
def test_towers_of_different_devices_run_at_once(policy, num_towers):
    """And, where towers take turns, those of one device never do."""
    found = pauses(["/cpu:1", "/cpu:2"], num_towers, policy)
    here, there = found[: num_towers // 2], found[num_towers // 2 :]
    assert max(here[0][0], there[0][0]) < min(here[0][1], there[0][1])
    if num_towers == 4:
        for first, second in (here, there):
            assert first[1] <= second[0]


def test_a_step_asks_for_the_policy_of_its_devices(monkeypatch):
    for value, expected in (("1", GPU), ("0", CPU)):
        monkeypatch.setenv(REHEARSAL, value)
        assert make_step(None).policy is expected
