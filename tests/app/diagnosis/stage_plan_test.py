"""What stages hold and send, counted by hand."""

import keras
import tensorflow as tf

from towers.app.diagnosis.stage_plan import stage_traffic, table
from towers.machine.policy import GPU
from towers.step import TowerStep

L = keras.layers


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
    found = stage_traffic(step, 8, batch)
    assert [row.layers for row in found] == [["first"], ["second"], ["both", "third"]]
    assert [row.devices for row in found] == [
        [f"/cpu:{i}", f"/cpu:{i + 3}"] for i in range(3)
    ]
    assert [row.parameters for row in found] == [4 * 5 * 5, 4 * 6 * 6, 4 * 12 * 7]
    assert [row.most_towers for row in found] == [2, 2, 1]
    # first's output goes to second and third; second's to third
    later, back = [2 * (2 * 4 * 5), 2 * 4 * 6, 0], [0, 2 * 4 * 5, 2 * 4 * (5 + 6)]
    for row, *expected in zip(found, later, back, strict=True):
        sizes = row.later - expected[0], row.back - expected[1]  # of arrays, and their number
        assert all(0 <= size <= 16 for size in sizes)
    assert found[1].held >= 2 * 4 * 6 and found[2].held is None
    lines = table(found)
    assert lines[2].startswith("1      /cpu:1, /cpu:4  144 bytes   ")
    assert lines[3].endswith("both ... third (2)")
