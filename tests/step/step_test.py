"""TowerStep against Keras on one device, and what must not change."""

import gc
import weakref
import hashlib

import keras
import numpy as np
import pytest

import towers
from towers.machine import devices
from towers.machine.devices import CPU
from towers.divide.tower_step import TowerStep
from towers.step.state import variable_digest

L = keras.layers


def metrics():
    return ["accuracy", keras.metrics.AUC(name="auc")]


def build(dropout=0.0):
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((6,)),
            L.Dense(8, activation="tanh"),
            L.Dropout(dropout),
            L.Dense(1),
            L.Activation("sigmoid"),
        ]
    )


def data(size=23):
    rng = np.random.default_rng(size)
    return rng.normal(size=(size, 6)), rng.integers(0, 2, (size, 1)).astype(float)


def make_step(model, num_towers=4, num_devices=2, optimizer="sgd", **options):
    names = devices.tower_devices(num_devices, "cpu")
    options = {"loss": "binary_crossentropy", **options}
    return TowerStep(model, optimizer, devices=names, num_towers=num_towers, **options)


def values(variables):
    return [v.numpy() for v in variables]


@pytest.mark.matrix  # train.py has these bits, and make_parallel(...).fit is Keras'
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
        lambda: keras.optimizers.Adam(0.01, clipnorm=0.05, weight_decay=0.01),
        lambda: keras.optimizers.RMSprop(0.01, use_ema=True),
    ],
)
def test_twenty_updates_are_those_of_keras_on_one_device(optimizer, float64):
    ours, theirs = build(), build()
    theirs.compile(optimizer(), "binary_crossentropy", metrics=metrics(), jit_compile=False)
    step = make_step(ours, optimizer=optimizer(), metrics=metrics())
    for size in [23, 8, 3, 1] * 5:
        logs = step(*data(size))
        expected = theirs.train_on_batch(*data(size), return_dict=True)
        theirs.reset_metrics()
        assert set(logs) == set(expected)  # and close: Keras sums metrics in float32
        for name, value in logs.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-6, err_msg=name)
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def test_train_batch_gives_running_means_and_a_call_this_batchs_values(float64):
    step = make_step(build(), metrics=["accuracy"], optimizer=keras.optimizers.SGD(0.0))
    first, second = step(*data(8)), step(*data(16))
    step.reset_metrics()
    step.train_batch(*data(8))
    both = step.train_batch(*data(16))
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(both[name], (8 * first[name] + 16 * second[name]) / 24)


def test_gradients_change_nothing():
    model = build(dropout=0.5)
    step = make_step(model, optimizer="adam")
    before = values([*model.variables, *step.optimizer.variables])
    first, second = step.gradients(*data()), step.gradients(*data())
    np.testing.assert_equal(values([*model.variables, *step.optimizer.variables]), before)
    np.testing.assert_equal(values(second[1]), values(first[1]))


def test_dropout_differs_between_towers_and_between_steps():
    """The gradient of a kernel by one row is what the dropout before it has left of the row."""
    model = keras.Sequential([keras.Input((50,)), L.Dropout(0.5), L.Dense(1)])
    step = make_step(model, loss=lambda y, y_pred: y_pred, num_towers=3, num_devices=1)
    x, y, seen = np.ones((3, 50)), np.ones((3, 1)), set()
    for _ in range(2):
        for weights in np.eye(3):
            kernel, _ = step.gradients(x, y, weights)[1]
            seen.add(tuple(kernel.numpy().ravel() > 0))
        step(x, y)
    assert len(seen) == 6


def test_predictions_come_in_order():
    model = build()
    step = make_step(model, num_towers=5)
    for size in (23, 5, 3):
        x, _ = data(size)
        np.testing.assert_allclose(step.predict_batch(x), model(x), rtol=1e-5)


def test_an_optimizer_that_is_built_stays_as_it_is():
    """A model's file brings one; built twice, Keras' LossScaleOptimizer has its counters twice."""
    model = build()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    before = list(map(id, optimizer.variables))
    make_step(model, optimizer=optimizer)
    assert list(map(id, optimizer.variables)) == before


@pytest.mark.parametrize(
    "batch_norm, mean",
    [
        ("average", [2 / 3 * 1 + 1 / 3 * 4, 2 / 3 * 1 + 1 / 3 * 8]),
        ("tower0", [1, 1]),
    ],
)
def test_batch_norm_statistics_are_updated_once_a_step(batch_norm, mean):
    model = keras.Sequential([keras.Input((2,)), L.BatchNormalization(momentum=0.5), L.Dense(1)])
    step = make_step(model, loss="mse", num_towers=2, batch_norm=batch_norm)
    x = np.array([[0.0, 0.0], [2.0, 2.0], [4.0, 8.0]], "float32")  # shards: rows 0 and 1; row 2
    step(x, np.zeros((3, 1), "float32"))
    np.testing.assert_allclose(model.layers[0].moving_mean, 0.5 * np.array(mean), rtol=1e-6)


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: make_step(build(), num_towers=0), "num_towers .0. must be at least 1"),
        (
            lambda: make_step(build(), batch_norm="mean"),
            "must be one of average, synchronized, tower0",
        ),
        (
            lambda: make_step(build(), nonfinite="raise"),
            "'raise'.* must be one of apply, stop, skip",
        ),
        (lambda: make_step(keras.Sequential([L.Dense(1)])), "is not built"),
        (lambda: make_step(build())(np.ones((0, 6)), np.ones((0, 1))), "no examples"),
        (
            lambda: make_step(
                keras.Sequential(
                    [keras.Input((5, 6), batch_size=4), L.Bidirectional(L.GRU(1, stateful=True))]
                )
            ),
            "stateful=True",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_tracing_does_not_grow_with_the_tower_count():
    """The model's Python code runs once for all towers."""
    calls = []

    class Counts(L.Layer):
        def call(self, x):
            calls.append(1)
            return x

    model = keras.Sequential([keras.Input((6,)), Counts(), L.Dense(1)])
    step = make_step(model, num_towers=8)
    calls.clear()
    step(*data(8))
    step(*data(3))
    assert len(calls) == 1


def test_a_step_that_nobody_needs_any_more_leaves_no_graph_behind():
    """Nor, with it, parameters and slots: Keras' optimizers would keep them for ever."""
    step = make_step(build(), optimizer="adam", policy=CPU)
    step(*data())
    graph = weakref.ref(step.traces[-1].graph)
    del step
    gc.collect()
    assert graph() is None


def test_a_digest_is_of_the_bits_the_dtype_and_the_shape():
    values = [[0.0, 1.0], [-0.0, 1.0], [0.0, 1.5], [[0.0], [1.0]]]
    variables = [keras.Variable(np.array(value, "float32")) for value in values]
    variables += [keras.Variable(np.array([0.0, 1.0]), dtype="float64")]
    assert len({variable_digest(variable) for variable in variables}) == len(variables)
    same = keras.Variable(np.array(values[0], "float32"))
    assert variable_digest(variables[0]) == variable_digest(same)


def test_a_models_digest_begins_the_sha256_of_its_weights():
    model = keras.Sequential([keras.Input((2,)), L.Dropout(0.5), L.Dense(1)])
    model.set_weights([np.array([[1.0], [2.0]]), np.array([3.0])])
    model.layers[0].seed_generator.next()
    expected = hashlib.sha256(np.array([1.0, 2.0, 3.0], "<f4").tobytes()).hexdigest()
    assert towers.digest(model) == expected[:8]
    never_called = keras.Model()  # like a GAN, which calls its parts only
    never_called.part = model
    assert not never_called.built and towers.digest(never_called) == expected[:8]
    with pytest.raises(ValueError, match="is not built"):
        towers.digest(keras.Sequential([L.Dense(1)]))
