"""num_towers="auto": the towers double until the first step fits, and the run is as it began."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.app.loop_test import config, small_model
from towers.resume.snapshot import copy_arrays, variables_of
from towers.app.config import AUTO, TrainConfig
from towers.machine.devices import has_gpus
from towers.app.training import auto_towers
from towers.app.training.auto_towers import build_with_auto_towers

MODEL = "tests.app.training.auto_towers_test:hungry_model"
pytestmark = [
    pytest.mark.light,
    pytest.mark.skipif(has_gpus(), reason="asks the CPU's allocator for too much"),
]


class Hungry(keras.layers.Layer):
    """Of more than 5 examples asks for more memory than an address can name; adds nothing."""

    def call(self, x):
        times = tf.where(tf.shape(x)[0] > 5, tf.constant(2**54, tf.int64), 1)
        return x + 0 * tf.reduce_max(tf.tile(tf.stop_gradient(x), tf.stack([1, times])))


def hungry_model(input_shape, num_classes):
    inner = small_model(input_shape, num_classes)
    return keras.Sequential([keras.Input(input_shape), Hungry(), *inner.layers])


def insatiable_model(input_shape, num_classes):
    class Insatiable(keras.layers.Layer):
        def call(self, x):
            return x + tf.reduce_max(tf.tile(tf.stop_gradient(x), [1, 2**54]))

    return keras.Sequential([
        keras.Input(input_shape), Insatiable(), keras.layers.Dense(num_classes)
    ])


@pytest.mark.matrix
def test_towers_double_until_the_first_step_fits_and_the_state_is_that_of_the_beginning():
    """16 examples on 2 devices: 8 a tower, then 4."""
    run = build_with_auto_towers(config(model=MODEL, num_towers=AUTO))
    assert (run.step.num_towers, run.config.num_towers, run.config.accumulate) == (4, 4, 2)
    assert run.step.policy.take_turns
    assert run.notes == [
        "4 towers, 2 a device: a device has too little memory for 8 examples a tower"
    ]
    fresh = build_with_auto_towers(config(model=MODEL, num_towers=4))
    fresh = copy_arrays(variables_of(fresh.step))
    found = copy_arrays(variables_of(run.step))
    for (name, ours), theirs in zip(found.items(), fresh.values(), strict=False):
        if not name.startswith("metrics"):
            np.testing.assert_array_equal(ours, theirs)
    assert all(not np.any(v.numpy()) for v in run.step.metrics_variables)


@pytest.mark.matrix
def test_a_run_says_so_and_keeps_the_number_and_has_the_bits_of_one_that_was_given_it(
    capsys, tmp_path
):
    found, given = (str(tmp_path / name) for name in ("found", "given"))
    towers.train(config(model=MODEL, num_towers=AUTO, max_steps=2, run_dir=found))
    assert "          4 towers, 2 a device: a device has too little" in capsys.readouterr().out
    saved = json.loads((tmp_path / "found" / "config.json").read_text())
    assert (saved["num_towers"], saved["accumulate"], saved["batch_size"]) == (4, 2, 16)
    towers.train(TrainConfig(resume=found, max_steps=3))
    assert "Batch     16 global = 4 towers x 4" in capsys.readouterr().out
    towers.train(config(model=MODEL, num_towers=4, max_steps=3, run_dir=given))
    ends = [keras.saving.load_model(f"{path}/final.keras", {"Hungry": Hungry})
            for path in (found, given)]
    for a, b in zip(*(model.weights for model in ends), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_where_it_fits_at_once_there_is_one_tower_a_device():
    run = build_with_auto_towers(config(num_towers=AUTO))
    assert (run.config.num_towers, run.config.accumulate, run.notes) == (2, None, [])


@pytest.mark.matrix
def test_one_example_too_much_is_refused():
    with pytest.raises(ValueError, match="too little memory for 1 example a tower. Use a smaller"):
        build_with_auto_towers(config(
            model="tests.app.training.auto_towers_test:insatiable_model", num_towers=AUTO,
            batch_size=2
        ))


@pytest.mark.parametrize("values", [{"plan": True}, {"profile": True}, {"epochs": 0}])
def test_what_does_not_train_tries_no_step(values, monkeypatch):
    monkeypatch.setattr(auto_towers, "first_step_error", lambda run: pytest.fail("tried"))
    assert build_with_auto_towers(config(num_towers=AUTO, **values)).config.num_towers == 2


def test_several_workers_are_refused(monkeypatch):
    workers = type("Workers", (), {"num_workers": 2})
    monkeypatch.setattr(auto_towers, "join_workers", lambda: workers)
    with pytest.raises(ValueError, match="num_towers=auto looks at one worker's devices"):
        build_with_auto_towers(config(num_towers=AUTO))
