"""TowerStep and train.py, divided: a custom loop does what Keras does on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers

L, opt = keras.layers, keras.optimizers
ROWS = (11, 2, 11)  # uneven shards; fewer rows than towers
DEVICES = ["/cpu:0", "/cpu:1"]


@pytest.fixture(autouse=True)
def strict(float64):
    """Lets no warning pass."""


def dense():
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        keras.Input((6,)), L.Dense(7, activation="tanh", kernel_regularizer="l2"), L.Dense(3),
    ])  # fmt: skip


def noisy():
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        keras.Input((6,)), L.Dense(7, activation="tanh"), L.BatchNormalization(), L.Dropout(0.4),
        L.ActivityRegularization(l2=0.1), L.Dense(3),
    ])  # fmt: skip


def masked():
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        keras.Input((5,), dtype="int32"), L.Embedding(9, 4, mask_zero=True),
        L.LSTM(4, return_sequences=True), L.Dense(3),
    ])  # fmt: skip


def two_outputs():
    keras.utils.set_random_seed(3)
    x = keras.Input((6,))
    return keras.Model(x, {"a": L.Dense(3, name="a")(x), "b": L.Dense(1, name="b")(x)})


class OwnLoss(keras.Sequential):
    """Adds to Keras' loss, and leaves the loss out of its metrics."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + tf.reduce_max(tf.abs(y_pred)) + tf.reduce_mean(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        super().compute_metrics(x, y, y_pred, sample_weight)
        return {"largest": tf.reduce_max(y_pred)}


def own_loss():
    keras.utils.set_random_seed(3)
    return OwnLoss([keras.Input((6,)), L.Dense(3)])


def numbers(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 6)), rng.integers(0, 3, n), rng.uniform(0.5, 2, n)


def tokens(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 9, (n, 5)), rng.integers(0, 3, (n, 5)), rng.uniform(0.5, 2, (n, 1))


def for_two_outputs(n, seed=0):
    rng = np.random.default_rng(seed)
    y = {"a": rng.integers(0, 3, n), "b": rng.normal(size=(n, 1))}
    return rng.normal(size=(n, 6)), y, {"a": rng.uniform(0.5, 2, n), "b": rng.uniform(0.5, 2, n)}


def classes():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def recipe():
    return {"loss": classes(), "metrics": ["accuracy"]}


def recipe_of_two():
    return {
        "loss": {"a": classes(), "b": "mse"}, "loss_weights": {"a": 2.0, "b": 0.5},
        "metrics": {"a": ["accuracy"], "b": ["mae", keras.metrics.RootMeanSquaredError()]},
    }  # fmt: skip


PROGRAMS = {
    "regularizer": (dense, numbers, recipe, lambda: opt.SGD(0.1, momentum=0.9)),
    "noise and statistics": (noisy, numbers, recipe, lambda: opt.Adam(0.01, global_clipnorm=0.1)),
    "mask": (masked, tokens, recipe, lambda: opt.Adam(0.01, clipnorm=0.05)),
    "outputs": (two_outputs, for_two_outputs, recipe_of_two, lambda: opt.RMSprop(0.01)),
    "custom loss": (own_loss, numbers, lambda: {"loss": classes()}, lambda: opt.SGD(0.1)),
    "accumulation": (dense, numbers, recipe, lambda: opt.Adam(gradient_accumulation_steps=2)),
    "averages": (
        dense, numbers, recipe, lambda: opt.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)
    ),
    "loss scale": (
        dense, numbers, recipe, lambda: opt.LossScaleOptimizer(opt.SGD(0.1), dynamic_growth_steps=2)
    ),
}  # fmt: skip


def make_step(model, optimizer="sgd", num_towers=3, **options):
    options = {"loss": classes(), **options}
    return towers.TowerStep(model, optimizer, devices=DEVICES, num_towers=num_towers, **options)


def state(step):
    return [*step.model.variables, *step.optimizer.variables, *step.metrics_variables]


def values(step):
    return [variable.numpy() for variable in state(step)]


def assert_close(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.telling("noise and statistics", "outputs", "custom loss", "loss scale")
@pytest.mark.parametrize("name", PROGRAMS)
def test_updates_evaluation_and_predictions_are_those_of_keras_on_one_device(name):
    build, data, make_recipe, optimizer = PROGRAMS[name]
    ours, theirs = build(), build()
    step = make_step(ours, optimizer(), **make_recipe())
    options = {"jit_compile": False, "auto_scale_loss": False, "run_eagerly": True}
    theirs.compile(optimizer(), **make_recipe(), **options)
    for seed, n in enumerate(ROWS):
        logs = step(*data(n, seed))
        expected = theirs.train_on_batch(*data(n, seed), return_dict=True)
        if name == "custom loss":
            expected["loss"] = theirs.metrics[0].result()
        theirs.reset_metrics()
        assert set(logs) == set(expected)
        for key, value in logs.items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-6, err_msg=key)
    assert_close(ours.variables, theirs.variables)
    assert_close(step.optimizer.variables, theirs.optimizer.variables)
    step.reset_metrics()
    logs = step.test_batch(*data(7))
    expected = theirs.test_on_batch(*data(7), return_dict=True)
    assert_close([logs[key] for key in expected], list(expected.values()))
    predictions = tf.nest.flatten(step.predict_batch(data(7)[0]))
    assert_close(predictions, tf.nest.flatten(theirs.predict_on_batch(data(7)[0])))
    assert len(step.traces) == 3  # one for each method, whatever the number of rows


@pytest.mark.parametrize("build, data", [(dense, numbers), (masked, tokens)])
def test_gradients_are_those_of_a_tape_and_no_loss_scale_is_applied(build, data):
    model, (x, y, weights) = build(), data(11)
    model.compile(opt.LossScaleOptimizer(opt.SGD(0.1)), classes())
    step = towers.TowerStep(model, devices=DEVICES, num_towers=3)
    loss, gradients = step.gradients(x, y, weights)
    with tf.GradientTape() as tape:
        expected = model.compute_loss(x, y, model(tf.constant(x)), weights)
    kinds = tape.gradient(expected, model.trainable_variables)
    assert list(map(type, gradients)) == list(map(type, kinds))  # slices stay slices
    assert_close(map_dense([loss, *gradients]), map_dense([expected, *kinds]))


def map_dense(gradients):
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


def test_gradients_change_no_variable_no_seed_and_no_statistic():
    step = make_step(noisy(), "adam", metrics=["accuracy"])
    step(*numbers(11))
    before = values(step)
    first, second = step.gradients(*numbers(11)), step.gradients(*numbers(11))
    np.testing.assert_equal(values(step), before)
    assert_close([first[0], *first[1]], [second[0], *second[1]])


# The noise scale


def test_the_noise_scale_is_what_the_shards_gradients_give():
    """A regularizer's gradient counts in each tower for its share of the examples."""
    rng = np.random.default_rng(0)
    x, y, w, weight = rng.normal(size=(11, 2)), rng.normal(size=(11, 1)), np.ones((2, 1)), 0.1
    model = keras.Sequential([
        keras.Input((2,)),
        L.Dense(1, use_bias=False, kernel_initializer="ones",
                kernel_regularizer=keras.regularizers.L2(weight)),
    ])  # fmt: skip
    step = make_step(model, opt.SGD(0.1), loss="mse", num_towers=3, noise_scale=True)
    logs = step(x, y)
    shards, sizes = [slice(0, 4), slice(4, 8), slice(8, 11)], np.array([4, 4, 3])
    own = [2 * x[s].T @ (x[s] @ w - y[s]) / n + 2 * weight * w for s, n in zip(shards, sizes)]
    mean = sum(n / 11 * g for n, g in zip(sizes, own))
    a = sum(n / 11 * (g**2).sum() for n, g in zip(sizes, own))
    b = (mean**2).sum()
    expected = ((a - b) * 11 / 2) / ((3 * b - a) / 2)
    assert float(logs["noise_scale"]) == pytest.approx(expected, rel=1e-6)


def test_the_noise_scale_of_slices_is_that_of_their_dense_gradients(monkeypatch):
    x, y, _ = tokens(11)
    one_hot = keras.Sequential([
        keras.Input((5,), dtype="int32"), L.CategoryEncoding(9, output_mode="one_hot"),
        L.Dense(4, use_bias=False), L.Dense(3),
    ])  # fmt: skip
    table = keras.Sequential([
        keras.Input((5,), dtype="int32"), L.Embedding(9, 4), L.Dense(3)
    ])  # fmt: skip
    table.set_weights(one_hot.get_weights())
    found = [make_step(m, noise_scale=True)(x, y)["noise_scale"] for m in (one_hot, table)]
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-5)


# The rest of the interface


def test_what_was_trainable_when_the_step_was_made_is_trained():
    model = dense()
    model.layers[0].trainable = False
    step = make_step(model)
    model.layers[0].trainable = True
    before = model.get_weights()
    with pytest.warns(UserWarning, match="`trainable` has changed since the step was made"):
        step(*numbers(11))
    assert model.layers[0].trainable and len(step.gradients(*numbers(11))[1]) == 2
    changed = [not np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
    assert changed == [False, False, True, True]


def test_unlisted_variables_are_part_of_the_state():
    count = tf.Variable(0.0, dtype="float64")

    class Counts(L.Layer):
        def call(self, x):
            count.assign_add(1.0)
            return x

    model = keras.Sequential([keras.Input((6,)), Counts(), L.Dense(3)])
    step = make_step(model, metrics=["accuracy"])
    step.build_metrics("train", *numbers(4))
    assert [v.value is count for v in step.unlisted_variables] == [True]
    step(*numbers(4))
    step.gradients(*numbers(4))
    assert float(count) == 1
