"""Keras' callbacks do on a parallel model what they do on one device."""

import keras
import numpy as np
import pytest

import towers
from tests import processes
from tests.parallel.fits import Interrupt, Recorder
from tests.parallel.pairs import (
    CLASSIFIER,
    Own,
    assert_same_fit,
    assert_same_weights,
    build_pair,
    classifier,
    fit_pair,
    rows,
)
from towers.machine.devices import tower_devices
from towers.step import noise_scale

C, L = keras.callbacks, keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(44, 5))
Y = X[:, :3].argmax(axis=1)
pytestmark = pytest.mark.usefixtures("float64")


def pair_of(optimizer=lambda: "adam"):
    return build_pair(classifier, **{**CLASSIFIER, "optimizer": optimizer})


def test_callbacks_stop_a_fit_and_change_its_rate_as_in_keras(tmp_path):
    """Of an optimizer that averages the weights."""
    pair = pair_of(lambda: keras.optimizers.Adam(0.3, use_ema=True, ema_momentum=0.9))
    events, files = [], []
    for i, model in enumerate(pair):
        keras.utils.set_random_seed(2)
        recorder = Recorder()
        callbacks = [
            C.SwapEMAWeights(swap_on_epoch=True),
            C.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch)),
            C.ReduceLROnPlateau(factor=0.5, patience=1),
            C.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(own=epoch)),
            C.EarlyStopping("own", mode="min", patience=3, restore_best_weights=True),
            C.CSVLogger(tmp_path / f"{i}.csv"),
        ]
        history = model.fit(
            *rows(),
            batch_size=7,
            epochs=30,
            validation_split=0.3,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, recorder],
        )
        events.append((recorder.events, history.epoch))
        files.append((tmp_path / f"{i}.csv").read_text().splitlines())
    assert events[0] == events[1] and len(events[0][1]) < 30
    assert files[0][0] == files[1][0]
    for a, b in zip(files[1][1:], files[0][1:], strict=True):
        ours, theirs = (np.array([float(v) for v in row.split(",")]) for row in (a, b))
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    assert_same_weights(pair)


class Crash(C.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


@pytest.mark.matrix
def test_backup_and_restore_resumes_where_the_run_ended(tmp_path):
    """Two epochs, a crash, a fresh model: the same weights as four epochs at once."""

    def fit(*callbacks):
        model = pair_of().ours
        return model.fit(
            *rows(), batch_size=7, epochs=4, shuffle=False, verbose=0, callbacks=[*callbacks]
        )

    expected = fit().model
    with pytest.raises(InterruptedError):
        fit(C.BackupAndRestore(tmp_path / "backup"), Crash())
    again = fit(C.BackupAndRestore(tmp_path / "backup"))
    assert again.epoch == [2, 3]
    np.testing.assert_equal(again.model.get_weights(), expected.get_weights())


@pytest.mark.matrix
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision_learns_what_keras_learns(policy):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    pair = build_pair(classifier, optimizer=lambda: "sgd", loss="mse")
    scaled = isinstance(pair.ours.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    x, _ = rows()
    theirs, ours = fit_pair(pair, lambda: (x, x[:, :3]), batch_size=7, epochs=5)
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=0.02)
    assert ours["loss"][-1] < ours["loss"][0]


class Replaces(C.Callback):
    """Replaces the optimizer, as Keras has it: the train function is made anew."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            self.model.make_train_function(force=True)


@pytest.mark.matrix
def test_a_callback_may_replace_the_optimizer():
    pair = build_pair(classifier, **CLASSIFIER)
    assert_same_fit(pair, rows, batch_size=7, epochs=3, callbacks=lambda: [Replaces()])
    assert int(pair.ours.optimizer.iterations) == 10


TRACKED = """
import sys
import keras, numpy as np

calls = []

def track():
    fit = keras.Model.fit

    def tracked(self, x, *args, **kwargs):
        calls.append("tracked")
        return fit(self, x, *args, **kwargs)

    keras.Model.fit = lambda *args, **kwargs: tracked(*args, **kwargs)

if sys.argv[1] == "before":
    track()
import towers
towers.make_parallel  # imports what it is made of
if sys.argv[1] == "after":
    track()

towers.logical_cpus(2)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
parallel = towers.make_parallel(model, 2, num_towers=3)
parallel.compile("sgd", "mse")
x, y = np.random.default_rng(0).normal(size=(25, 6)).astype("float32"), np.ones((25, 2))
first, found = model.get_weights(), set()
for args, options in [
    ((x, y, 7, 2, 0), {}),
    ((x, y, 7, 2, 0, [towers.Resume("a", every=2)]), {}),
    ((), dict(x=x, y=y, batch_size=7, epochs=2, verbose=0,
              callbacks=towers.Resume("b", every=2))),
]:
    model.set_weights(first)
    parallel.fit(*args, shuffle=False, **options)
    found.add(b"".join(value.tobytes() for value in model.get_weights()))
print(calls, len(found))
"""


@pytest.mark.telling("after")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_tracker_that_replaces_fit_is_called_and_changes_nothing(when, tmp_path):
    """Experiment trackers do it, before towers is imported or after."""
    run = processes.run("-c", TRACKED, when, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-1] == "['tracked', 'tracked', 'tracked'] 1"
    assert (tmp_path / "a/checkpoints").exists() and (tmp_path / "b/checkpoints").exists()


# towers.NoiseScale


def compiled(kind=keras.Sequential):
    keras.utils.set_random_seed(3)
    model = kind([keras.Input((5,)), L.Dense(7, activation="relu"), L.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], jit_compile=False)
    return model


def test_noise_scale_logs_the_values_of_a_step(monkeypatch):
    """That it changes no weights is in ledger_test."""
    monkeypatch.setattr(noise_scale, "EVERY", 3)
    own, parallel = compiled(), towers.make_parallel(compiled(), 2, num_towers=3)
    options = {"batch_size": 3, "epochs": 2, "shuffle": False, "verbose": 0}
    found, plain = (  # the second fit forgets the first
        parallel.fit(X, Y, callbacks=callbacks, **options).history
        for callbacks in ([towers.NoiseScale()], [])
    )
    assert {*found} - {*plain} == {"noise_scale"}
    scaled = keras.optimizers.LossScaleOptimizer(own.optimizer, dynamic_growth_steps=1)
    step = towers.TowerStep(
        own,
        scaled,
        devices=tower_devices(2, "cpu"),
        num_towers=3,
        noise_scale=True,
        jit_compile=False,
    )
    for expected in found["noise_scale"]:
        step.reset_metrics()
        for i in range(0, 44, 3):
            logs = step.train_batch(X[i : i + 3], Y[i : i + 3])
        assert 0 < expected < np.inf
        assert float(logs["noise_scale"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.matrix
def test_a_resumed_fit_keeps_the_noise_estimates_of_its_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(noise_scale, "EVERY", 2)

    def fit(directory, *callbacks):
        return (
            towers.make_parallel(compiled(), 2, num_towers=3)
            .fit(
                X,
                Y,
                batch_size=4,
                verbose=0,
                callbacks=[towers.Resume(directory, every=1), towers.NoiseScale(), *callbacks],
            )
            .history["noise_scale"]
        )

    with pytest.raises(InterruptedError):
        fit(tmp_path / "a", Interrupt(8))
    (resumed,), (whole,) = fit(tmp_path / "a"), fit(tmp_path / "b")
    assert resumed == whole and np.isfinite(whole)


def test_noise_scale_is_an_error_where_towers_have_no_gradients():
    with pytest.raises(ValueError, match="NoiseScale works only in the fit of a parallel model"):
        compiled().fit(X, Y, verbose=0, callbacks=[towers.NoiseScale()])
    with pytest.raises(ValueError, match="leave towers.NoiseScale.. out"):
        parallel = towers.make_parallel(compiled(Own), 2)
        parallel.fit(X, Y, verbose=0, callbacks=[towers.NoiseScale()])
