"""The comparison of the averaged with the large-batch gradient, and what it leaves alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.app.diagnosis.verify import multiplied_in, verify_gradients
from towers.step import TowerStep
from towers.step.compiled import losses

LOSS = "sparse_categorical_crossentropy"


def make_step(*layers, num_towers=3, batch_norm="average", last=None, **options):
    keras.utils.set_random_seed(1)
    with tf.device("/cpu:0"):
        model = keras.Sequential(
            [keras.Input((6,)), *layers, keras.layers.Dense(4, activation="softmax", dtype=last)]
        )
    devices = ["/cpu:0", "/cpu:1", "/cpu:2"][:num_towers]
    return TowerStep(
        model, "adam", LOSS, devices=devices, num_towers=num_towers, batch_norm=batch_norm,
        **options,
    )


def make_batch():
    generator = np.random.default_rng(2)
    x = generator.normal(size=(10, 6)).astype(np.float32)
    return tf.constant(x), tf.constant(generator.integers(0, 4, 10).astype(np.int32))


def test_without_random_layers_the_difference_is_float_rounding():
    step = make_step(keras.layers.Dense(8, activation="relu"))
    found = verify_gradients(step, LOSS, *make_batch())
    assert found.difference < 1e-5
    assert (found.draws_noise, found.batch_norm_layers) == (False, [])
    assert str(found).endswith("the averaged gradient is the large-batch gradient")


def test_a_wrong_average_is_found_in_the_variable_where_it_is_largest(monkeypatch):
    step = make_step(keras.layers.Dense(8, name="first"))
    loss, gradients = step.gradients(*make_batch())
    wrong = [1.5 * gradients[0], 1.1 * gradients[1], *gradients[2:]]
    monkeypatch.setattr(step, "gradients", lambda *batch: (loss, wrong))
    found = verify_gradients(step, LOSS, *make_batch())
    assert found.difference == pytest.approx(0.5, rel=1e-4)
    assert found.variable == step.model.trainable_variables[0].path
    assert "MORE than float rounding" in str(found)
    assert "which loss or layer it is cannot be told" in found.error


@pytest.mark.parametrize("policy, jit_compile, multiplied, within", [
    ("float64", False, "float64", 1e-10), ("mixed_float16", False, "float16", 2e-2),
    ("mixed_bfloat16", False, "bfloat16", 2e-1), ("float32", True, "float32", 1e-3),
])
def test_the_bound_is_that_of_the_dtype_that_layers_multiply_in(
    policy, jit_compile, multiplied, within, monkeypatch, request
):
    if policy == "float64":
        request.getfixturevalue("float64")  # the loss's dtype, too
    layer = keras.layers.Dense(8, activation="relu", dtype=policy)
    step = make_step(layer, last=policy, jit_compile=jit_compile)
    found = verify_gradients(step, LOSS, *make_batch())
    assert (found.multiplied_in, found.tolerance, found.cause) == (multiplied, within, "")
    assert found.difference <= within
    assert str(found).endswith("the averaged gradient is the large-batch gradient" + (
        "" if policy == "float32" else f", within float rounding of {multiplied} ({within:.0e})"
    ))
    loss, gradients = step.gradients(*make_batch())  # a sum in place of a mean
    monkeypatch.setattr(step, "gradients", lambda *batch: (loss, [3.0 * g for g in gradients]))
    assert verify_gradients(step, LOSS, *make_batch()).cause


def test_sums_in_16_bits_may_lose_what_the_large_batch_loses():
    """3,000 equal terms in bfloat16 stop growing at 256: a bias' gradient on one tower."""
    layers = keras.layers
    with tf.device("/cpu:0"):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2, dtype="mixed_bfloat16")])
    step = TowerStep(model, "sgd", "mse", devices=["/cpu:0", "/cpu:1", "/cpu:2"])
    x, y = np.zeros((3000, 6), np.float32), np.ones((3000, 2), np.float32)
    found = verify_gradients(step, "mse", x, y)
    assert found.difference > 0.2 and found.variable.endswith("bias")
    assert found.error is None and "the averaged gradient is the large-batch" in str(found)
    assert model.layers[-1].compute_dtype == "bfloat16"


def test_float32_is_tf32_on_gpus_that_have_it_unless_told_otherwise(monkeypatch):
    model, gpus = make_step().model, ["/gpu:0"]
    details = {"A": {"compute_capability": (7, 5)}, "B": {"compute_capability": (9, 0)}}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", details.get)
    for names, expected in (["A"], "float32"), (["A", "B"], "TF32"):
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind, names=names: names)
        assert multiplied_in(model, gpus) == expected
    assert multiplied_in(model, ["/cpu:0"]) == "float32"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert multiplied_in(model, gpus) == "float32"
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        assert multiplied_in(model, gpus) == "float32"
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


def test_a_gradient_that_is_no_number_is_no_small_difference(monkeypatch):
    step = make_step(keras.layers.Dense(8))
    loss, gradients = step.gradients(*make_batch())
    wrong = [*gradients[:-1], np.nan * gradients[-1]]
    monkeypatch.setattr(step, "gradients", lambda *batch: (loss, wrong))
    assert verify_gradients(step, LOSS, *make_batch()).error


class Sampling(keras.layers.Layer):
    """Adds noise by keras.random, or by tf.random."""

    def __init__(self, draw, **options):
        super().__init__(**options)
        self.draw, self.seed_generator = draw, keras.random.SeedGenerator(4)

    def call(self, x):
        if self.draw is tf.random.normal:
            return x + x * self.draw(tf.shape(x), dtype=x.dtype)
        return x + x * self.draw(keras.ops.shape(x), dtype=x.dtype, seed=self.seed_generator)


@pytest.mark.parametrize("last", ["float32", "mixed_bfloat16"])
def test_keras_noise_is_left_out_of_both_gradients(last):
    step = make_step(
        keras.layers.Dense(6), keras.layers.Dropout(0.5, dtype=last), Sampling(keras.random.normal),
        keras.layers.Reshape((3, 2)), keras.layers.GRU(4, dropout=0.3, recurrent_dropout=0.2),
        keras.layers.AlphaDropout(0.4), last=last,
    )
    found = verify_gradients(step, LOSS, *make_batch())
    assert found.difference < (1e-5 if last == "float32" else 2e-2)
    assert "the averaged gradient is the large-batch gradient" in str(found)


def test_what_makes_towers_differ_by_design_is_named():
    layers = [keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.5)]
    found = verify_gradients(make_step(*layers), LOSS, *make_batch())
    assert (found.draws_noise, found.batch_norm_layers) == (False, ["norm"])
    assert str(found).endswith("by design, each tower normalizes by its own shard in norm")
    found = verify_gradients(make_step(Sampling(tf.random.normal)), LOSS, *make_batch())
    assert (found.draws_noise, found.error) == (True, None)
    assert str(found).endswith("by design, each tower draws its own random numbers by tf.random")


def test_synchronized_batch_norm_is_the_large_batchs():
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization()]
    found = verify_gradients(make_step(*layers, batch_norm="synchronized"), LOSS, *make_batch())
    assert found.batch_norm_layers == []
    assert found.difference < 1e-4


def test_one_tower_is_the_large_batch_whatever_its_layers():
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    found = verify_gradients(make_step(*layers, num_towers=1), LOSS, *make_batch())
    assert (found.difference, found.draws_noise) == (0, False)


def test_no_variable_and_no_seed_changes():
    step = make_step(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))
    variables = [*step.model.variables, *step.optimizer.variables]
    before = [v.numpy().copy() for v in variables]
    random_before = np.random.get_state()[1].copy()
    verify_gradients(step, LOSS, *make_batch())
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)
    np.testing.assert_array_equal(np.random.get_state()[1], random_before)


def test_gradients_of_embeddings_are_compared_as_dense_ones():
    with tf.device("/cpu:0"):
        model = keras.Sequential([
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(7, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(4, activation="softmax"),
        ])
    step = TowerStep(model, "sgd", LOSS, devices=["/cpu:0", "/cpu:1"], num_towers=2)
    generator = np.random.default_rng(3)
    x, y = generator.integers(0, 7, (9, 5)), generator.integers(0, 4, 9)
    assert verify_gradients(step, LOSS, tf.constant(x), tf.constant(y)).difference < 1e-5


class Centred(keras.layers.Layer):
    def call(self, x):
        return x - tf.reduce_mean(x, axis=0)


class AddsARoot(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.sqrt(tf.reduce_mean(tf.square(x))))
        return x


class RootLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.sqrt(tf.reduce_mean(tf.square(y - y_pred)))


def compiled(*layers, loss="mse", kind=keras.Sequential):
    keras.utils.set_random_seed(1)
    with tf.device("/cpu:0"):
        model = kind([keras.Input((3,)), keras.layers.Dense(4), *layers, keras.layers.Dense(1)])
    model.compile("sgd", loss)
    return model


def centring():
    return compiled(Centred(name="centred"))


def data():
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    split = x, x.sum(axis=1, keepdims=True) + 20
    return split, split


def verified(model, num_towers=3):
    loss, loss_weights = losses(model)
    step = TowerStep(
        model, "sgd", loss, loss_weights=loss_weights, devices=["/cpu:0"], num_towers=num_towers
    )
    return verify_gradients(step, loss, *data()[0], loss_weights=loss_weights)


@pytest.mark.parametrize(("model", "words"), [
    (centring, ["verify_test.py:", "gives each row a value"]),
    (lambda: compiled(keras.layers.Dropout(0.5), Centred()), ["gives each row a value"]),
    (lambda: compiled(AddsARoot()), ["takes Sqrt", "a loss that a layer"]),
    (lambda: compiled(kind=RootLoss), ["takes Sqrt", "a loss that a layer, compute_loss"]),
])
def test_what_makes_the_gradients_differ_is_named_with_the_way_out(model, words):
    model = model()
    before = [v.numpy().copy() for v in model.variables]
    error = verified(model).error
    assert all(word in error for word in [*words, "towers.gather"]), error
    assert "num_towers=1" in error and "verify_gradients=warn" in error
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
