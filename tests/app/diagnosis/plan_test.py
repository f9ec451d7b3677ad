"""The transfers of a step, counted by hand."""

import dataclasses
import re

import keras
import tensorflow as tf

from towers.app.diagnosis import plan
from towers.machine.devices import GPU
from towers.divide.tower_step import TowerStep


L = keras.layers
WEIGHTS = (3 * 5 + 5) * 4
PLACE = 4 * 4  # where a tower's rows are in the batch
LOSSES = 2 * 4  # for the update, and for the running mean


def traffic(num_towers, devices, batch_size=12, layers=(), policy=GPU, **options):
    """Of a dense layer of 3 x 5, 4 bytes a number."""
    with tf.device("/cpu:0"):
        model = keras.Sequential([keras.Input((3,)), L.Dense(5), *layers])
    step = TowerStep(
        model,
        "sgd",
        "mse",
        devices=devices,
        num_towers=num_towers,
        policy=policy,
        batch_norm="average",
        **options,
    )
    specs = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 5])
    return plan.traffic(step, batch_size, specs)


def example_bytes(count):
    return count * (3 + 5) * 4


def test_the_parameters_device_moves_nothing_and_the_others_each_their_part():
    here, there = traffic(2, ["/cpu:0", "/cpu:1"], batch_size=7).values()
    assert here == plan.Traffic((0, 0), [4])
    # in: kernel and bias as one, the tower's place, x and y; out: the sums as one
    assert there == plan.Traffic(
        (1, 1), [3], WEIGHTS + PLACE, example_bytes(3), 0, LOSSES + WEIGHTS, 4, 1
    )


def test_statistics_and_noise_go_down_and_only_sums_come_back():
    layers = [L.BatchNormalization(), L.Dropout(0.5)]
    first, second = traffic(2, ["/cpu:1", "/cpu:2"], layers=layers).values()
    trained, statistics, noise = WEIGHTS + (5 + 5) * 4, (5 + 5) * 4, 3 * 8  # a key and a counter
    weight = 4 + 4 + 1  # of the statistics: the tower's rows, all rows, whether it has any
    for each in (first, second):
        assert each.parameters == trained + statistics + noise + PLACE + weight
    assert second.results == first.sums == first.results == LOSSES + trained + statistics


def test_sums_leave_a_device_for_that_of_the_left_child_or_home():
    """Of (((0 1) 2) ((3 4) 5)), 2 and (3 4) leave the second device."""
    rows = traffic(6, ["/cpu:1", "/cpu:2", "/cpu:3"]).values()
    assert [row.results for row in rows] == [k * (LOSSES + WEIGHTS) for k in (1, 2, 2)]


def test_copies_exchange_slices_of_gradients_and_of_their_sums():
    rows = traffic(4, [f"/cpu:{i}" for i in range(4)], strategy="mirrored")
    a_slice = WEIGHTS // 4
    for device in ("/cpu:1", "/cpu:2", "/cpu:3"):
        few_scalars = rows[device].sums - 6 * a_slice - PLACE  # such as the learning rate
        assert 4 <= few_scalars <= 20
        assert rows[device].inputs == example_bytes(3)


def test_unpacked_every_tensor_is_a_send():
    packed, apart = (
        traffic(1, ["/cpu:1"], policy=dataclasses.replace(GPU, pack_transfers=packs))["/cpu:1"]
        for packs in (True, False)
    )
    # kernel and bias; two losses and the gradients of both
    assert (apart.sends_in, apart.sends_out) == (packed.sends_in + 1, packed.sends_out + 3)
    assert (apart.parameters, apart.results) == (packed.parameters, packed.results)


def test_the_stages_have_their_devices_layers_and_bytes_of_parameters():
    x = keras.Input((4,))
    first = L.Dense(5, name="first")(x)
    second = L.Dense(6, name="second", activation="tanh")(first)
    model = keras.Model(x, L.Dense(7, name="third")(L.Concatenate(name="both")([first, second])))
    step = TowerStep(
        model,
        "sgd",
        "mse",
        devices=[f"/cpu:{i}" for i in range(6)],
        num_towers=4,
        gpus_per_tower=3,
        stages=["second", "both"],
        policy=GPU,
    )
    lines = [re.split(r" {2,}", line) for line in plan.stage_table(step)]
    _, on, parameters, most_towers, layers = zip(*lines[1:])
    assert on == ("/cpu:0, /cpu:3", "/cpu:1, /cpu:4", "/cpu:2, /cpu:5")
    assert parameters == ("100 bytes", "144 bytes", "336 bytes")  # 5 x 5, 6 x 6, 12 x 7 numbers
    assert most_towers == ("2", "2", "1")
    assert layers == ("first", "second", "both ... third (2)")
    assert plan.layer_table(step, batch_size=6) == [  # towers of 2, 2, 1 and 1 rows
        "layer   device          largest output  bytes     variables",
        "first   /cpu:0, /cpu:3  2 x 5           40 bytes  100 bytes",
        "second  /cpu:1, /cpu:4  2 x 6           48 bytes  144 bytes",
        "both    /cpu:2, /cpu:5  2 x 11          88 bytes  -",
        "third   /cpu:2, /cpu:5  2 x 7           56 bytes  336 bytes",
    ]


def test_the_layers_of_any_model_have_their_rows_or_are_left_out():
    twice, x = L.Dense(4, name="twice"), keras.Input((4,))
    mean = keras.ops.mean(twice(twice(x)), axis=None)  # has no rows
    step = TowerStep(keras.Model(x, mean), "sgd", "mse", devices=[f"/cpu:{i}" for i in range(4)])
    _, first, second, last = plan.layer_table(step, batch_size=8)
    assert first == "twice  /cpu:0 ... /cpu:3  2 x 4           32 bytes  80 bytes"
    assert second == "twice  /cpu:0 ... /cpu:3  2 x 4           32 bytes  -"
    assert last.split()[-4:] == ["/cpu:3", "4", "bytes", "-"]
    own = type("Own", (keras.Model,), {"call": lambda self, x: twice(x)})()
    own.build((None, 4))
    assert plan.layer_table(TowerStep(own, "sgd", "mse"), batch_size=8) == []
