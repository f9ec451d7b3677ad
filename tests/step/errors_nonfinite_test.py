"""A NaN or infinite loss or gradient is found before the update, and named."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.resuming import train
from towers.step.errors import NonFiniteError, are_finite

L = keras.layers
SGD, LossScaleOptimizer = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer
TOWERS, BATCH = 4, 16  # 4 examples a tower
LOSS = "sparse_categorical_crossentropy"


@keras.saving.register_keras_serializable("towers_tests")
class Root(L.Layer):
    """sqrt(x): NaN below zero; at zero finite, with an infinite gradient."""

    def build(self, shape):
        self.offset = self.add_weight(shape=(), initializer="zeros", name="offset")

    def call(self, x):
        return keras.ops.sqrt(x + self.offset)


def root_model(input_shape=(3,), num_classes=3):
    return keras.Sequential([
        keras.Input(input_shape), Root(name="root"), L.BatchNormalization(), L.Dropout(0.1),
        L.Dense(num_classes, activation="softmax"),
    ], name="roots")


def batch():
    generator = np.random.default_rng(0)
    x = generator.uniform(1, 2, (BATCH, 3)).astype("float32")
    return x, generator.integers(0, 3, BATCH)


def make_step(nonfinite, optimizer="adam"):
    keras.utils.set_random_seed(0)
    with tf.device("/cpu:0"):
        return towers.TowerStep(
            root_model(), optimizer, LOSS, metrics=["accuracy"],
            devices=["/cpu:0", "/cpu:1"], num_towers=TOWERS, nonfinite=nonfinite,
        )


def values(step):
    variables = [*step.model.variables, *step.optimizer.variables, *step.metrics_variables]
    return [v.numpy() for v in variables]


@pytest.mark.parametrize("value, message", [
    (-1.0, "the loss of tower 2 on /cpu:1 is NaN or infinite."),
    (0.0, "the gradient of roots/root/offset in tower 2 on /cpu:1 is NaN or infinite."),
])
def test_stop_names_tower_device_and_variable_and_changes_nothing(value, message):
    step = make_step("stop")
    x, y = batch()
    step(x, y)
    before = values(step)
    x[9, 1] = value - step.model.get_layer("root").offset.numpy()  # in tower 2: 8 to 11
    with pytest.raises(NonFiniteError) as caught:
        step.train_batch(x, y)
    assert str(caught.value) == message
    np.testing.assert_equal(before, values(step))


def test_skip_leaves_the_update_out_and_goes_on_as_if_the_batch_had_not_been():
    ours, theirs = make_step("skip"), make_step("skip")
    x, y = batch()
    bad = x.copy()
    bad[0] = -1
    assert ours(x, y) == theirs(x, y)
    logs = ours.train_batch(bad, y)
    assert np.isfinite(logs["loss"]) and int(ours.optimizer.iterations) == 1
    np.testing.assert_equal(values(theirs), values(ours))
    assert ours.train_batch(x, y) == theirs.train_batch(x, y)
    np.testing.assert_equal(values(theirs), values(ours))


def test_apply_updates_as_keras_does():
    step = make_step("apply")
    x, y = batch()
    x[0] = -1
    assert np.isnan(step(x, y)["loss"])
    assert np.isnan(step.model.trainable_variables[0].numpy())


def test_checking_changes_no_bit():
    x, y = batch()
    results = []
    for nonfinite in ("apply", "stop", "skip"):
        step = make_step(nonfinite)
        for size in (BATCH, 7, 3):  # the last two with ragged and with empty shards
            step.train_batch(x[:size], y[:size])
        results.append(values(step))
    np.testing.assert_equal([results[0]] * 2, results[1:])


def test_overflow_of_scaled_gradients_is_left_to_the_loss_scale():
    """Scaled by 1e38, gradients overflow float32: skip, halve."""
    step = make_step("stop", LossScaleOptimizer(SGD(), initial_scale=1e38))
    x, y = batch()
    before = values(step)[0]
    step(x * 1e-6, y)  # d sqrt(x) / dx is large there
    assert float(step.optimizer.dynamic_scale) == np.float32(1e38) / 2
    assert int(step.optimizer.iterations) == 0
    np.testing.assert_array_equal(values(step)[0], before)


def test_a_nan_loss_is_not_the_loss_scales_business():
    step = make_step("stop", LossScaleOptimizer(SGD()))
    x, y = batch()
    x[0] = -1
    with pytest.raises(NonFiniteError, match="the loss of tower 0 on /cpu:0"):
        step(x, y)


def test_half_precision_gradients_are_squared_in_float32():
    found = are_finite(tf.constant(1.0), [tf.constant([6e4, 6e4], tf.float16)])
    assert found.numpy().all()


# Whole runs


def root_data():
    """50 examples; the 21st in the first epoch's order, in step 2, has a negative number."""
    from towers.app.datasets.batches import load_examples, shuffled_batches

    generator = np.random.default_rng(0)
    x = generator.uniform(1, 2, (70, 3)).astype("float32")
    y = generator.integers(0, 3, 70)
    numbers = load_examples((np.arange(50), np.arange(50)))
    order = [int(i) for b, _ in shuffled_batches(numbers, 16, seed=0, epoch=0) for i in b]
    x[order[20]] = -1
    return (x[:50], y[:50]), (x[50:], y[50:])


FLAGS = (
    "--model=tests.step.errors_nonfinite_test:root_model",
    "--dataset=tests.step.errors_nonfinite_test:root_data",
    "--num_gpus=2", "--batch_size=16", "--epochs=2", "--device=cpu", "--run_dir=run",
)


def test_a_run_stops_before_the_update_and_goes_on_without_it(tmp_path):
    code, stdout, stderr = train(*FLAGS, cwd=tmp_path)
    assert code == 2
    assert stderr.endswith(
        "error: step 2: the loss of tower 0 on /cpu:0 is NaN or infinite. The update was not "
        "made. Lower --learning_rate, or leave out such updates: python train.py --resume=run "
        "--nonfinite=skip.\n"
    )
    assert "saved at step 1. Resume: python train.py --resume=run" in stdout
    assert not (tmp_path / "run" / "best.keras").exists()
    code, stdout, stderr = train("--resume=run", "--nonfinite=skip", cwd=tmp_path)
    assert code == 0, stdout + stderr
    assert "Warning   1 update left out in this epoch: a NaN or infinite loss" in stdout
    assert "; 2 of 8 updates left out" in stdout.splitlines()[-1]
    final = keras.saving.load_model(tmp_path / "run" / "final.keras")
    assert all(np.isfinite(v.numpy()).all() for v in final.weights)
