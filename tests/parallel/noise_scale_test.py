"""towers.NoiseScale in fit: its logs are TowerStep's, and the weights those of a fit without it."""

import keras
import numpy as np
import pytest

import towers
from towers.machine.devices import tower_devices

L = keras.layers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(44, 5)), RNG.integers(0, 3, 44)


def make(kind=keras.Sequential):
    keras.utils.set_random_seed(3)
    model = kind([keras.Input((5,)), L.Dense(7, activation="relu"), L.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], jit_compile=False)
    return model


def test_its_logs_are_those_of_the_step_and_the_weights_those_without_it():
    plain, measured, own = make(), make(), make()
    options = {"batch_size": 20, "epochs": 2, "shuffle": False, "verbose": 0}
    towers.make_parallel(plain, 2, num_towers=3).fit(X, Y, **options)
    parallel = towers.make_parallel(measured, 2, num_towers=3)
    history = parallel.fit(X, Y, validation_data=(X, Y), callbacks=[towers.NoiseScale()],
                           **options).history
    assert list(history) == ["accuracy", "loss", "noise_scale", "val_accuracy", "val_loss"]
    assert towers.digest(measured) == towers.digest(plain)
    step = towers.TowerStep(own, devices=tower_devices(2, "cpu"), num_towers=3, noise_scale=True)
    for expected in history["noise_scale"]:
        step.reset_metrics()
        for i in range(0, 44, 20):
            logs = step.train_batch(X[i:i + 20], Y[i:i + 20])
        assert float(logs["noise_scale"]) == pytest.approx(expected, rel=1e-5) and expected > 0
    assert "noise_scale" not in parallel.fit(X, Y, **options).history


def test_a_resumed_fit_goes_on_with_the_epochs_estimates(tmp_path):
    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    def fit(directory, *callbacks):
        return towers.make_parallel(make(), 2, num_towers=3).fit(
            X, Y, batch_size=10, verbose=0,
            callbacks=[towers.Resume(directory, every=1), towers.NoiseScale(), *callbacks],
        ).history["noise_scale"]

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "a", Dies())
    assert fit(tmp_path / "a") == fit(tmp_path / "b")


class Custom(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def test_where_towers_have_no_gradients_it_is_refused():
    with pytest.raises(ValueError, match="NoiseScale works only in the fit of a parallel model"):
        make().fit(X, Y, verbose=0, callbacks=[towers.NoiseScale()])
    with pytest.raises(ValueError, match="leave towers.NoiseScale.. out"):
        towers.make_parallel(make(Custom), 2).fit(X, Y, verbose=0, callbacks=[towers.NoiseScale()])
