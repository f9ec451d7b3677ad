"""What a compiled model hands to towers, running metrics, and the gradient noise scale."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from towers.machine.devices import tower_devices
from towers.step import compiled, noise_scale
from towers.step.noise_scale import NoiseMetric

L = keras.layers
WIDTH, DISTANCE, SIGMA = 10, 0.5, 1.0  # of a regression


def model_of(*outputs, kind=keras.Model, **options):
    x = keras.Input((3,))
    layers = [L.Dense(size, name=name)(x) for name, size in outputs]
    model = kind(x, layers if len(layers) > 1 else layers[0])
    model.compile("sgd", **options)
    return model


def batch(*sizes):
    return tf.ones([4, 3]), *(tf.nest.map_structure(lambda n: tf.fill([4, n], 2.0), sizes),) * 2


def test_a_metric_of_several_numbers_is_an_error_that_names_it(tmp_path):
    """In a run, whose results.csv has a column for it; a step returns them all."""
    model = model_of(("a", 2), loss="mse", metrics=[keras.metrics.F1Score(name="scores")])
    x, y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")
    assert towers.TowerStep(model, num_towers=1).test_batch(x, y)["scores"].shape == [2]
    config = towers.TrainConfig(num_gpus=1, device="cpu", run_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"metric 'scores' is of shape \(2,\), but a column"):
        towers.train(config, model=model, train=(x, y))


@pytest.mark.parametrize("name", ["train_step", "test_step"])
def test_a_custom_step_is_an_error(name):
    own = type("Own", (keras.Model,), {name: lambda self, data: {}})
    compiled.check_steps(model_of(("a", 1), loss="mse"))
    with pytest.raises(ValueError, match=rf"has a custom {name}.*make_parallel"):
        towers.TowerStep(model_of(("a", 1), kind=own, loss="mse"))


def test_a_compiled_model_needs_no_further_arguments():
    """Its optimizer, loss, loss weights and metrics are those of Keras' own train_on_batch."""
    outputs, options = (
        (("a", 1), ("b", 2)),
        {
            "loss": ["mse", "mae"],
            "loss_weights": [2.0, 3.0],
            "metrics": [["mae"], ["mse"]],
            "weighted_metrics": [["mse"], []],
        },
    )
    model, theirs = (model_of(*outputs, **options, run_eagerly=eager) for eager in (False, True))
    theirs.set_weights(model.get_weights())
    step, (x, y, _) = towers.TowerStep(model, num_towers=2), batch(1, 2)
    logs = step(x, y, tf.range(4.0))
    expected = theirs.train_on_batch(x, list(y), tf.range(4.0), return_dict=True)
    assert step.optimizer is model.optimizer
    assert model.get_metrics_result()["a_mae"] == logs["a_mae"]  # the model's own, too
    np.testing.assert_allclose(*([values[k] for k in logs] for values in (logs, expected)), 1e-6)
    assert set(logs) == set(expected)
    for a, b in zip(model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_arguments_replace_those_of_a_compiled_model():
    model = model_of(("a", 1), loss="mse", metrics=["mse"])
    x, y, _ = batch(1)
    for arguments, expected in [
        ({"optimizer": "adam"}, {"loss", "mse"}),
        ({"loss": "mae"}, {"loss"}),
        ({"metrics": ["mae"]}, {"loss", "mae"}),
    ]:
        step = towers.TowerStep(model, num_towers=2, **arguments)
        assert set(step.test_batch(x, y)) == expected


@pytest.mark.parametrize(
    "given, message",
    [
        ((), "no optimizer and no loss"),
        (("adam",), "no loss"),
        (("compiled", "mse"), "no optimizer"),
    ],
)
def test_a_model_that_is_not_compiled_needs_an_optimizer_and_a_loss(given, message):
    model = keras.Sequential([keras.Input((3,)), L.Dense(1)])
    with pytest.raises(ValueError, match=f"TowerStep has {message}.* call model.compile"):
        towers.TowerStep(model, *given)


# The gradient noise scale


@functools.cache
def regression(num_towers=8):
    """A linear model at a distance of DISTANCE in each weight from the data's, at rest."""
    model = keras.Sequential([keras.Input((WIDTH,)), L.Dense(1, use_bias=False)])
    model.set_weights([np.full((WIDTH, 1), DISTANCE)])
    return towers.TowerStep(
        model,
        keras.optimizers.SGD(0.0),
        "mse",
        devices=tower_devices(2, "cpu"),
        num_towers=num_towers,
        noise_scale=True,
    )


def regression_batch(rng, size):
    x = rng.normal(size=(size, WIDTH))
    return x, SIGMA * rng.normal(size=(size, 1))


def test_the_noise_scale_of_a_regression_is_that_of_its_covariance(float64):
    """An example's gradient is 2 x (x.d - e): |G|^2 = 4|d|^2, tr(S) = 4(|d|^2 (W + 1) + W s^2)."""
    step, rng = regression(), np.random.default_rng(1)
    for _ in range(150):
        logs = step(*regression_batch(rng, 61))  # shards of 7 and 8
    square = WIDTH * DISTANCE**2
    expected = (square * (WIDTH + 1) + WIDTH * SIGMA**2) / square
    assert float(logs["noise_scale"]) == pytest.approx(expected, rel=0.1)
    step.reset_metrics()
    assert np.isnan(float(step.noise.result()))
    with pytest.raises(ValueError, match="noise_scale needs two towers"):
        regression(num_towers=1)


def test_the_first_steps_count_and_then_every_kth(monkeypatch):
    monkeypatch.setattr(noise_scale, "EVERY", 3)
    step, rng, counts = regression(), np.random.default_rng(1), []
    step.optimizer.iterations.assign(0)
    step.reset_metrics()
    for i in range(20):
        if i == 18:
            step.reset_metrics()
        step.train_batch(*regression_batch(rng, 4))
        counts.append(int(step.noise.count))
    assert counts == [*range(1, 11), 10, 10, 11, 11, 11, 12, 12, 12, 1, 2]


def test_skipped_updates_delay_a_measurement_and_prevent_none():
    optimizer, metric, rng = keras.optimizers.SGD(), NoiseMetric(), np.random.default_rng(0)
    assert all(metric.is_due(optimizer) for _ in range(3))  # at first, each step is
    metric.count.assign(10)
    due: set[int] = set()
    while int(optimizer.iterations) < 100:
        if metric.is_due(optimizer):
            due.add(int(optimizer.iterations))
        optimizer.iterations.assign_add(rng.integers(0, 2))
    assert due == {0, 20, 40, 60, 80}


def test_single_shards_and_gradients_that_are_not_finite_do_not_count():
    metric = NoiseMetric()
    metric.update_state([1.0, 0.0], [5, 0], 1.0)
    metric.update_state([1.0, np.nan], [5, 5], 1.0)
    assert np.isnan(float(metric.result()))
    metric.update_state([1.0, 1.0], [1, 1], 0.5)  # opposite to each other, but for little
    assert float(metric.result()) == np.inf
