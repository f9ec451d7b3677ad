"""make_parallel of models with steps of their own: all that Keras' loop does with them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.conformance.custom_step_cases import OWN
from tests.conformance.steps import fit_alike
from tests.parallel.pairs import assert_close, assert_same_logs

CASES = {case.name: case for case in OWN}


def both(name):
    """(by Keras, on towers), with the same initial values."""
    models = []
    for on_towers in (False, True):
        keras.utils.set_random_seed(5)
        model = CASES[name].make()
        models.append(towers.make_parallel(model, 2, num_towers=3) if on_towers else model)
    return models


def data(name, count=22):
    return CASES[name].data(count, np.random.default_rng(count))


def fit(model, data, **options):
    return model.fit(*data, **{"batch_size": 4, "verbose": 0, "shuffle": False, **options}).history


def evaluate(model, data):
    return model.evaluate(*data, batch_size=4, verbose=0, return_dict=True)


def train_on_batch(model, data):
    weight = np.linspace(0.0, 2.0, len(data[0]))
    logs = [model.train_on_batch(*data, w, return_dict=True) for w in (None, weight)]
    return {f"{name} {i}": value for i, log in enumerate(logs) for name, value in log.items()}


@pytest.mark.telling("calls_super-evaluate")
@pytest.mark.parametrize(
    "name, call",
    [
        ("calls_super", evaluate),
        ("calls_super", train_on_batch),
        ("vae", lambda model, batch: fit(model, batch, validation_data=data("vae", 9))),
    ],
)
def test_calls_of_a_model_with_custom_steps_give_keras_results(name, call, float64):
    """`calls_super` defines only a train_step; its `evaluate` is the built-in one."""
    theirs, ours = both(name)
    theirs.run_eagerly = True  # sooner than traced, to the same values
    assert_same_logs(*(call(model, data(name)) for model in (ours, theirs)))
    assert_close(ours.variables, theirs.variables, 1e-10, 1e-10)


def test_several_steps_at_once_predictions_and_a_frozen_layer_give_keras_results(float64):
    rows, models, histories, predictions = data("vae"), both("vae"), [], []
    for model, is_eager in zip(models, (True, False)):
        model.run_eagerly, model.steps_per_execution = is_eager, 3
        history = fit(model, rows, epochs=2)
        batches = tf.data.Dataset.from_tensor_slices(rows).batch(4)
        predictions.append(model.predict(batches, verbose=0))
        model.encoder.trainable = False
        model.compile(keras.optimizers.SGD(0.01), jit_compile=False, run_eagerly=is_eager)
        encoder = model.encoder.get_weights()
        frozen = fit(model, rows)
        histories.append({**history, **{f"{name} frozen": v for name, v in frozen.items()}})
        np.testing.assert_equal(model.encoder.get_weights(), encoder)
    assert_same_logs(*reversed(histories))
    (theirs, ours), (expected, found) = models, predictions
    assert_close(ours.variables, theirs.variables, 1e-10, 1e-10)
    assert list(found) == list(expected) == ["code", "output"]
    assert_close(found.values(), expected.values(), 1e-10)


class Teaches(keras.Model):
    """A distillation; its teacher, which it trains, too, is built by nothing but its loss."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = keras.layers.Dense(3), keras.layers.Dense(3)

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((self.teacher(x) - y_pred) ** 2)


class Attacks(keras.Model):
    """Trains on examples moved along the sign of their own gradient; built by its first step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(self(x) ** 2)
        moved = x + 0.1 * tf.sign(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(moved) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Dqn(keras.Model):
    """Takes five parts of a replay buffer; a condition is Python's, which AutoGraph rewrites."""

    def __init__(self):
        super().__init__()
        self.values = keras.layers.Dense(3)

    def call(self, x):
        return self.values(x)

    @tf.function
    def train_step(self, data):
        state, action, reward, next_state, is_last = data
        best = tf.reduce_max(self(next_state), axis=1)
        with tf.GradientTape() as tape:
            chosen = tf.gather(self(state), action, batch_dims=1)
            loss = tf.reduce_mean((chosen - reward - (1 - is_last) * best) ** 2)
            if loss > 1.0:
                loss = loss * 0.1
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def test_a_step_may_take_any_tuple_and_be_a_function_of_tensorflow(float64):
    rng = np.random.default_rng(0)
    floats = [rng.normal(size=size) for size in ((23, 4), 23, (23, 4), 23)]
    replay = (floats[0], rng.integers(0, 3, 23), *floats[1:])

    def trained(on_towers):
        keras.utils.set_random_seed(1)
        model = Dqn()
        model(floats[0])
        if on_towers:
            model = towers.make_parallel(model, 2, num_towers=3)
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, jit_compile=False)
        batches = tf.data.Dataset.from_tensor_slices(replay).batch(5)
        return model.fit(batches, epochs=2, verbose=0).history, model

    (theirs, model), (ours, on_towers) = trained(False), trained(True)
    assert_same_logs(ours, theirs)
    assert_close(on_towers.variables, model.variables, 1e-12, 1e-12)


@pytest.mark.parametrize("model_class", [Teaches, Attacks])
def test_layers_that_only_a_step_builds_are_trained_as_in_keras(model_class, float64):
    def make():
        model = model_class()
        model.compile("adam", jit_compile=False)
        return model

    x = np.random.default_rng(0).normal(size=(22, 4))
    fit_alike(make, x, x[:, :3], num_towers=3, batch_size=8, epochs=2)
