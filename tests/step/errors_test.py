"""A tower's error is told as that tower meets it; a NaN or infinity is found before the update."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.resuming import RESUME, train
from towers.step.errors import NonFiniteError, are_finite, first_error, values_explained

L = keras.layers
SGD, LossScaleOptimizer = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer
TOWERS, BATCH = 4, 16  # 4 examples a tower
LOSS = "sparse_categorical_crossentropy"
X, Y = np.ones((12, 4), np.float32), np.arange(12) % 3
WRONG = np.where(np.arange(12) == 7, 9, Y)  # of the second of three towers
OUT_OF_RANGE = "label value of 9 which is outside the valid range"


def test_fit_and_evaluate_raise_the_error_of_the_tower():
    layers = [keras.Input((4,)), L.Dense(8), L.Dense(3, activation="softmax")]
    parallel = towers.make_parallel(keras.Sequential(layers), 3)
    parallel.compile("sgd", LOSS)
    before = [v.numpy() for v in parallel.weights]
    for method in (parallel.fit, parallel.evaluate) * 3:
        with pytest.raises(tf.errors.InvalidArgumentError, match=OUT_OF_RANGE):
            method(X, WRONG, batch_size=12, verbose=0)
    np.testing.assert_equal([v.numpy() for v in parallel.weights], before)


def test_a_cancelled_error_stays_unless_a_second_attempt_finds_its_cause():
    for run, expected in [
        (lambda: None, tf.errors.CancelledError),
        (lambda: 1 / 0, tf.errors.CancelledError),
        (lambda: tf.ones(2) + tf.ones(3), tf.errors.InvalidArgumentError),
    ]:
        with pytest.raises(expected), first_error(run):
            raise tf.errors.CancelledError(None, None, "RecvAsync is cancelled.")


def test_the_error_of_an_operation_that_rejects_values_has_one_line():
    @tf.function
    def graph(x):
        tf.debugging.Assert(x < 3, ["too large [1, 2)"])
        return x

    message = r"^step 3: assertion failed: .*too large \[1, 2\).* \(in "
    with pytest.raises(ValueError, match=message), values_explained("step 3"):
        graph(tf.constant(5))


# NaN and infinity


@keras.saving.register_keras_serializable("towers_tests")
class Root(L.Layer):
    """sqrt(x): NaN below zero; at zero finite, with an infinite gradient."""

    def build(self, shape):
        self.offset = self.add_weight(shape=(), initializer="zeros", name="offset")

    def call(self, x):
        return keras.ops.sqrt(x + self.offset)


def root_model():
    return keras.Sequential(
        [
            keras.Input((3,)),
            Root(name="root"),
            L.BatchNormalization(),
            L.Dropout(0.1),
            L.Dense(3, activation="softmax"),
        ],
        name="roots",
    )


def batch():
    generator = np.random.default_rng(0)
    x = generator.uniform(1, 2, (BATCH, 3)).astype("float32")
    return x, generator.integers(0, 3, BATCH)


def make_step(nonfinite, optimizer="sgd"):
    keras.utils.set_random_seed(0)
    with tf.device("/cpu:0"):
        return towers.TowerStep(
            root_model(),
            optimizer,
            LOSS,
            metrics=["accuracy"],
            devices=["/cpu:0", "/cpu:1"],
            num_towers=TOWERS,
            nonfinite=nonfinite,
            batch_norm="average",  # a mean of the whole batch would pass NaN on to all towers
        )


def values(step):
    variables = [*step.model.variables, *step.optimizer.variables, *step.metrics_variables]
    return [v.numpy() for v in variables]


@pytest.fixture(scope="module")
def steps():
    """One of each way, after 3 updates; the last two have uneven and empty shards."""
    x, y = batch()
    made = {nonfinite: make_step(nonfinite) for nonfinite in ("skip", "stop", "apply")}
    for step in made.values():
        for size in (BATCH, 7, 3):
            step.train_batch(x[:size], y[:size])
    return made


def test_stop_names_tower_device_and_variable_and_changes_nothing(steps):
    step = steps["stop"]
    x, y = batch()
    before = values(step)
    for value, message in [
        (-1.0, "the loss of tower 2 on /cpu:1 is NaN or infinite."),
        (0.0, "the gradient of roots/root/offset in tower 2 on /cpu:1 is NaN or infinite."),
    ]:
        x[9, 1] = value - step.model.get_layer("root").offset.numpy()  # tower 2 has rows 8 to 11
        with pytest.raises(NonFiniteError) as caught:
            step.train_batch(x, y)
        assert str(caught.value) == message
        np.testing.assert_equal(before, values(step))


def test_checks_change_no_bit_and_skip_leaves_one_update_out(steps):
    skip, stop, apply = steps.values()
    x, y = batch()
    bad = x.copy()
    bad[0] = -1
    before = values(skip)
    assert np.isfinite(skip.train_batch(bad, y)["loss"])
    assert int(skip.optimizer.iterations) == 3
    np.testing.assert_equal(before, values(skip))
    for step in steps.values():
        step.train_batch(x, y)
    np.testing.assert_equal([values(skip)] * 2, [values(stop), values(apply)])
    assert np.isnan(apply(bad, y)["loss"])
    assert np.isnan(apply.model.trainable_variables[0].numpy())  # as Keras does


def test_a_loss_scale_handles_one_towers_overflow_but_not_a_nan_loss():
    """Gradients that are scaled by 1e38 overflow float32: the update is skipped, the scale halved."""
    step = make_step("stop", LossScaleOptimizer(SGD(), initial_scale=1e38))
    x, y = batch()
    before = [v.numpy() for v in step.trainable_variables]
    x[9] *= 1e-6  # d sqrt(x) / dx is large there
    step(x, y)
    assert float(step.optimizer.dynamic_scale) == np.float32(1e38) / 2
    assert int(step.optimizer.iterations) == 0
    np.testing.assert_equal([v.numpy() for v in step.trainable_variables], before)
    x[0] = -1
    with pytest.raises(NonFiniteError, match="the loss of tower 0 on /cpu:0"):
        step(x, y)


def test_half_precision_gradients_are_squared_in_float32():
    found = are_finite(tf.constant(1.0), [tf.constant([6e4, 6e4], tf.float16)])
    assert found.numpy().all()


# Whole runs


def roots(input_shape, num_classes):
    return keras.Sequential(
        [keras.Input(input_shape), Root(), L.Dense(num_classes, activation="softmax")]
    )


def root_data():
    """50 examples; the 21st in the first epoch's order, in step 2, has a negative number."""
    from towers.app.datasets.batches import load_examples
    from towers.resume.epoch import Epoch

    generator = np.random.default_rng(0)
    x = generator.uniform(1, 2, (70, 3)).astype("float32")
    y = generator.integers(0, 3, 70)
    numbers = load_examples((np.arange(50), np.arange(50)))
    order = [int(i) for b, _ in numbers.batches(Epoch(16, seed=0, number=0)) for i in b]
    x[order[20]] = -1
    return (x[:50], y[:50]), (x[50:], y[50:])


FLAGS = (
    "--model=tests.step.errors_test:roots --dataset=tests.step.errors_test:root_data "
    "--num_gpus=2 --batch_size=16 --epochs=2 --device=cpu --run_dir=run"
).split()


def test_a_run_stops_before_the_update_and_resumes_without_it(tmp_path):
    code, stdout, stderr = train(*FLAGS, cwd=tmp_path)
    assert code == 2
    assert stderr.endswith(
        "error: step 2: the loss of tower 0 on /cpu:0 is NaN or infinite. The update was not "
        "made. Lower --learning_rate, or leave out such updates: python train.py --resume=run "
        "--nonfinite=skip --trust_run_dir.\n"
    )
    assert "saved at step 1. Resume: python train.py --resume=run" in stdout
    assert not (tmp_path / "run/best.keras").exists()
    code, stdout, stderr = train(*RESUME, "--nonfinite=skip", cwd=tmp_path)
    assert code == 0, stdout + stderr
    assert "Warning   1 update left out in this epoch: a NaN or infinite loss" in stdout
    assert "; 2 of 8 updates left out" in stdout.splitlines()[-1]
    final = keras.saving.load_model(tmp_path / "run/final.keras")
    assert all(np.isfinite(v.numpy()).all() for v in final.weights)
