"""The comparison of the averaged with the full-batch gradient, and what it leaves alone."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.app.diagnosis.verify import multiplied_in, verify_gradients
from towers.divide.tower_step import TowerStep

LOSS = "sparse_categorical_crossentropy"


def make_step(*layers, num_towers=3, batch_norm="average", last=None, **options):
    keras.utils.set_random_seed(1)
    with tf.device("/cpu:0"):
        model = keras.Sequential(
            [keras.Input((6,)), *layers, keras.layers.Dense(4, activation="softmax", dtype=last)]
        )
    devices = ["/cpu:0", "/cpu:1", "/cpu:2"][:num_towers]
    return TowerStep(
        model,
        "adam",
        LOSS,
        devices=devices,
        num_towers=num_towers,
        batch_norm=batch_norm,
        **options,
    )


def make_batch():
    generator = np.random.default_rng(2)
    x = generator.normal(size=(10, 6)).astype(np.float32)
    return tf.constant(x), tf.constant(generator.integers(0, 4, 10).astype(np.int32))


def test_a_wrong_average_is_found_in_the_variable_where_it_is_largest(monkeypatch):
    step = make_step(keras.layers.Dense(8, name="first"))
    loss, gradients = step.gradients(*make_batch())
    for factor, difference in ((1.5, 0.5), (np.nan, np.inf)):
        wrong = [factor * gradients[0], 1.1 * gradients[1], *gradients[2:]]
        monkeypatch.setattr(step, "gradients", lambda *batch, wrong=wrong: (loss, wrong))
        found = verify_gradients(step, *make_batch())
        assert found.difference == pytest.approx(difference, rel=1e-4)
        assert found.variable == step.model.trainable_variables[0].path
        assert "MORE than float rounding" in str(found)
        assert "num_towers=1" in found.error and "verify_gradients=warn" in found.error


@pytest.mark.parametrize(
    "policy, multiplied, within",
    [("float64", "float64", 1e-10), ("mixed_float16", "float32", 1e-5)],
)
def test_the_bound_is_that_of_the_dtype_of_the_parameters(
    policy, multiplied, within, monkeypatch, request
):
    """Mixed precision is compared in float32, in which 3,000 equal terms do not stop growing."""
    if policy == "float64":
        request.getfixturevalue("float64")  # the loss's dtype, too
    layer = keras.layers.Dense(8, activation="relu", dtype=policy)
    step = make_step(layer, last=policy, jit_compile=False)
    found = verify_gradients(step, *make_batch())
    assert (found.multiplied_in, found.cause) == (multiplied, "")
    assert found.difference <= within
    assert "the averaged gradient is the full-batch gradient" in str(found)
    assert ("within float rounding of" in str(found)) == (multiplied != "float32")
    assert layer.dtype_policy.name == policy
    loss, gradients = step.gradients(*make_batch())  # a sum in place of a mean
    monkeypatch.setattr(step, "gradients", lambda *batch: (loss, [3.0 * g for g in gradients]))
    assert verify_gradients(step, *make_batch()).cause


def test_float32_is_tf32_on_gpus_that_have_it_unless_a_setting_disables_it(monkeypatch):
    model, gpus = make_step().model, ["/gpu:0"]
    details = {"A": {"compute_capability": (7, 5)}, "B": {"compute_capability": (9, 0)}}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", details.get)
    for names, expected in (["A"], "float32"), (["A", "B"], "TF32"):
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind, names=names: names)
        assert multiplied_in(model, gpus) == expected
    assert multiplied_in(model, ["/cpu:0"]) == "float32"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert multiplied_in(model, gpus) == "float32"


class Sampling(keras.layers.Layer):
    """Adds noise by keras.random, or by tf.random."""

    def __init__(self, draw, **options):
        super().__init__(**options)
        self.draw, self.seed_generator = draw, keras.random.SeedGenerator(4)

    def call(self, x):
        if self.draw is tf.random.normal:
            return x + x * self.draw(tf.shape(x), dtype=x.dtype)
        return x + x * self.draw(keras.ops.shape(x), dtype=x.dtype, seed=self.seed_generator)


def test_keras_noise_is_left_out_of_both_gradients_and_nothing_changes():
    """Those of an embedding are compared as dense ones."""
    step = make_step(
        keras.layers.Embedding(7, 3),
        keras.layers.Dropout(0.5),
        Sampling(keras.random.normal),
        keras.layers.SimpleRNN(4, dropout=0.3, recurrent_dropout=0.2),
        keras.layers.AlphaDropout(0.4),
        num_towers=2,
    )
    variables = [*step.model.variables, *step.optimizer.variables]
    before = [v.numpy().copy() for v in variables]
    random_before = np.random.get_state()[1].copy()
    x, y = make_batch()
    found = verify_gradients(step, tf.abs(x), y)  # as integers
    assert found.difference < 1e-5 and found.by_design == []
    assert str(found).endswith("the averaged gradient is the full-batch gradient")
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)
    np.testing.assert_array_equal(np.random.get_state()[1], random_before)


norm = partial(keras.layers.BatchNormalization, name="norm")


def test_what_makes_towers_differ_by_design_is_named():
    found = verify_gradients(make_step(norm(), Sampling(tf.random.normal)), *make_batch())
    assert found.error is None
    reason = "tf.random draws other numbers for each computation and each tower normalizes"
    assert f"by design, {reason} by its own shard in norm" in str(found)
    found = verify_gradients(make_step(norm(), batch_norm="synchronized"), *make_batch())
    assert found.error is None and found.by_design == [] and found.difference < 1e-4
