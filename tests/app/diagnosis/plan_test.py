"""The transfers of a step, counted by hand."""

import dataclasses
import re

import keras
import pytest
import tensorflow as tf

from towers.app.diagnosis import plan
from towers.machine.devices import GPU
from towers.step import TowerStep

L = keras.layers
WEIGHTS = (3 * 5 + 5) * 4
SHARES = 4 + 8  # the loss scale, and the share of the one output
LOSS = 4


def traffic(num_towers, devices, batch_size=12, layers=(), policy=GPU, **options):
    """Of a dense layer of 3 x 5, 4 bytes a number."""
    with tf.device("/cpu:0"):
        model = keras.Sequential([keras.Input((3,)), L.Dense(5), *layers])
    step = TowerStep(
        model, "sgd", "mse", devices=devices, num_towers=num_towers, policy=policy,
        batch_norm="average", **options,
    )
    specs = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 5])
    return plan.traffic(step, batch_size, specs)


def example_bytes(count, num_towers=1):
    return count * (3 + 5) * 4 + num_towers * 8  # the share of the examples


def test_the_parameters_device_moves_nothing_and_the_others_each_their_part():
    here, there = traffic(2, ["/cpu:0", "/cpu:1"], batch_size=7).values()
    assert here == plan.Traffic((0, 0), [4])
    # in: kernel and bias as one, the loss scale, the shares, x and y; out: the sums, predictions
    assert there == plan.Traffic(
        (1, 1), [3], WEIGHTS + SHARES, example_bytes(3), 0, LOSS + WEIGHTS + 3 * 5 * 4, 6, 2
    )


def test_state_goes_down_and_only_sums_and_tower_0s_seeds_come_back():
    layers = [L.BatchNormalization(), L.Dropout(0.5)]
    first, second = traffic(2, ["/cpu:1", "/cpu:2"], layers=layers).values()
    trained, statistics, seeds = WEIGHTS + (5 + 5) * 4, (5 + 5) * 4, 2 * 8
    assert first.parameters == second.parameters == trained + statistics + seeds + SHARES
    predictions = 6 * 5 * 4
    assert second.results == first.sums + predictions == LOSS + trained + statistics + predictions
    assert first.results == second.results + seeds


@pytest.mark.parametrize(("num_towers", "count", "sums"), [
    (4, 2, [1, 1]),  # ((0 1) (2 3))
    (6, 2, [1, 1]),  # (((0 1) 2) ((3 4) 5))
    (6, 3, [1, 2, 2]),  # 2 and (3 4 5) leave the second
])
def test_sums_leave_a_device_for_that_of_the_left_child_or_home(num_towers, count, sums):
    rows = traffic(num_towers, [f"/cpu:{i + 1}" for i in range(count)]).values()
    predictions = 12 // count * 5 * 4
    assert [row.results - predictions for row in rows] == [k * (LOSS + WEIGHTS) for k in sums]


def test_copies_exchange_slices_of_gradients_and_of_their_sums():
    rows = traffic(4, [f"/cpu:{i}" for i in range(4)], strategy="mirrored")
    a_slice = -(-(LOSS + WEIGHTS) // 4 // 4) * 4
    for device in ("/cpu:1", "/cpu:2", "/cpu:3"):
        assert rows[device].sums == 6 * a_slice + SHARES
        assert rows[device].inputs == example_bytes(3)


def test_unpacked_every_tensor_is_a_send():
    packed, apart = (
        traffic(1, ["/cpu:1"], policy=dataclasses.replace(GPU, pack_transfers=packs))["/cpu:1"]
        for packs in (True, False)
    )
    # kernel and bias; the loss and the gradients of both
    assert (apart.sends_in, apart.sends_out) == (packed.sends_in + 1, packed.sends_out + 2)
    assert (apart.parameters, apart.results) == (packed.parameters, packed.results)


def test_the_table_lines_up_and_adds_up():
    assert plan.table(traffic(3, ["/cpu:0", "/cpu:1"], batch_size=8)) == [
        "device  towers  examples  parameters in  examples in  sums in  results out  sends in  "
        "sends out",
        "/cpu:0  0-1     2 x 3     -              -            -        -            0         0",
        "/cpu:1  2       2         92 bytes       72 bytes     -        124 bytes    6         2",
        "Each step moves 164 bytes to the devices and 124 bytes from them.",
    ]


def test_a_stage_holds_what_its_backward_pass_reads_and_sends_what_is_cut():
    """Of 8 examples in 4 towers: a tower has 2 of them, of 4 bytes a number."""
    x = keras.Input((4,))
    first = L.Dense(5, name="first")(x)
    second = L.Dense(6, name="second", activation="tanh")(first)
    model = keras.Model(x, L.Dense(7, name="third")(L.Concatenate(name="both")([first, second])))
    step = TowerStep(
        model, "sgd", "mse", devices=[f"/cpu:{i}" for i in range(6)], num_towers=4,
        gpus_per_tower=3, stages=["second", "both"], policy=GPU,
    )
    batch = tf.TensorSpec([None, 4]), tf.TensorSpec([None, 7])
    lines = [re.split(r" {2,}", line) for line in plan.stage_table(step, 8, batch)]
    _, on, parameters, held, most_towers, later, back, layers = zip(*lines[1:])
    assert on == ("/cpu:0, /cpu:3", "/cpu:1, /cpu:4", "/cpu:2, /cpu:5")
    assert parameters == ("100 bytes", "144 bytes", "336 bytes")  # 5 x 5, 6 x 6, 12 x 7 numbers
    assert most_towers == ("2", "2", "1")
    assert layers == ("first", "second", "both ... third (2)")
    # first's output goes to second and third; second's to third
    for found, expected in (later, [2 * 40, 48, 0]), (back, [0, 40, 88]):
        sizes = [int(cell.split()[0].replace("-", "0")) for cell in found]
        for found_size, size in zip(sizes, expected, strict=True):
            assert 0 <= found_size - size <= 16  # of arrays, and their number
    assert int(held[1].split()[0]) >= 48 and held[2] == "-"
