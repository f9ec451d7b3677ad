"""A fit with towers.Resume: every kind of data and step goes on; what it tells, saves and refuses.

That a fit goes on to the same bits wherever it was interrupted is in interrupted_test.
"""

import inspect
import os
import shutil
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.bits import bits
from tests.conformance.cases import noisy
from tests.conformance.cases import rows as random_rows
from tests.parallel.fits import Fits, Interrupt, Recorder, classifier, rows
from tests.conformance.assigned_test import keeps
from towers.resume import checkpointer, checkpoints, resumed_fit


@pytest.fixture(scope="module")
def model():
    return classifier()


@pytest.fixture(scope="module")
def fits(model):
    return Fits(model, *rows(), validation_data=rows(5))


def test_a_fit_resumes_between_executions_of_several_steps(tmp_path):
    """Executions of 3: 3 steps and 1; a step within one is refused."""
    fits = Fits(classifier(steps_per_execution=3, jit_compile=False), *rows())
    whole = fits.fit(tmp_path / "whole")
    assert fits.interrupted(tmp_path / "cut", [1, 1]) == whole
    with pytest.raises(InterruptedError):
        fits.fit(tmp_path / "other", after=1)
    fits.model.steps_per_execution = 2
    with pytest.raises(ValueError, match="^steps_per_execution .2.: .* step 3 of its epoch"):
        fits.fit(tmp_path / "other")


class Own(keras.Sequential):
    """Two optimizers, a metric that it hides, and noise of Keras' own seed."""

    def compile(self, **options):
        super().compile(**options)
        self.second = keras.optimizers.RMSprop(0.01)
        self.mean = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean]

    def train_step(self, data):
        (rows, _), weights = data, self.trainable_weights
        noisy = rows + 0.1 * keras.random.normal(tf.shape(rows))
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(noisy, training=True) - rows) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights[:2]), weights[:2]))
        self.second.apply_gradients(zip(tape.gradient(loss, weights[2:]), weights[2:]))
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}


def fit_fresh(make, directory, data=rows, every=2):
    """(history, values) of a model that is made anew for each fit."""
    resumed_fit.completed.clear()  # as in a new process
    model = make()
    history = model.fit(
        *data(),
        batch_size=7,
        epochs=2,
        verbose=0,
        callbacks=[towers.Resume(directory, every=every)],
    )
    optimizers = [o for o in vars(model).values() if isinstance(o, keras.optimizers.Optimizer)]
    values = [*model.variables, *(v for o in optimizers for v in o.variables)]
    return history.history, [bits(v) for v in values]


def forget(directory, step):
    """Leaves what a process has saved that was killed after this step."""
    for path in checkpoints.find(directory / "checkpoints"):
        if checkpoints.step_of(path) > step:
            shutil.rmtree(path)
    assert checkpoints.step_of(checkpoints.find(directory / "checkpoints")[0]) == step


class Two(keras.Model):
    """Dicts in, dicts out; built on the first batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = keras.layers.Dense(2), keras.layers.Dense(1)

    def call(self, inputs):
        return {"a": self.a(inputs["x"]), "b": self.b(inputs["x"])}


MODELS = {
    "a train_step of one's own": (
        lambda: Own([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(6)]),
        {"optimizer": "adam"},
        lambda x, y: (x, y),
        {"loss"},
    ),
    # A tf.Variable that counts calls scales the output; a generator is hidden in a closure.
    "what layers keep and Keras does not list": (
        keeps,
        {"optimizer": "adam", "loss": "mse"},
        lambda x, y: (x, x[:, :3]),
        {"loss", "by_row", "endpoint"},
    ),
    "several outputs of a model that is not built": (
        Two,
        {"optimizer": "adam", "loss": {"a": "mse", "b": "mae"}, "metrics": {"a": "mae"}},
        lambda x, y: ({"x": x}, {"a": x[:, :2], "b": x[:, :1]}),
        {"loss", "a_loss", "a_mae", "b_loss"},
    ),
}


@pytest.mark.telling("a train_step*", "what layers keep*")
@pytest.mark.parametrize("name", MODELS)
def test_a_fit_restores_all_variables_of_a_model(name, tmp_path):
    build, options, data, history = MODELS[name]

    def make():
        keras.utils.set_random_seed(3)
        parallel = towers.make_parallel(build(), 2, num_towers=3)
        parallel.compile(**options)
        return parallel

    whole = fit_fresh(make, tmp_path, lambda: data(*rows()))
    assert set(whole[0]) == history
    forget(tmp_path, 6)
    assert fit_fresh(make, tmp_path, lambda: data(*rows())) == whole


def test_a_resume_begins_with_a_short_batch_that_xla_does_not_compile(tmp_path):
    """Batches of 7 have shards of 3 and 2; the last is of 4. Dropout draws as XLA does."""

    def make(num_gpus=2):
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dropout(0.3), keras.layers.Dense(3, activation="softmax")]
        model = keras.Sequential([keras.Input((6,)), *layers])
        parallel = towers.make_parallel(model, num_gpus, num_towers=3)
        parallel.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
        return parallel

    whole = fit_fresh(make, tmp_path, every=7)
    forget(tmp_path, 7)
    assert fit_fresh(lambda: make(1), tmp_path) == whole


@pytest.mark.matrix
def test_a_fit_restores_a_loss_scale_and_averaged_weights(float64, tmp_path):
    """Of float16, whose scale falls at once; and a mean that replaces the weights at the end."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    made = []

    def make():
        inner = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.8)
        made.append(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**20))
        return classifier(optimizer=made[-1])

    whole = fit_fresh(make, tmp_path)
    assert np.isfinite(whole[0]["loss"]).all()
    assert float(made[-1].dynamic_scale) < 2.0**20
    forget(tmp_path, 6)
    assert fit_fresh(make, tmp_path) == whole


def test_a_signal_ends_the_reading_of_what_is_done_and_so_does_its_end(fits, tmp_path, capsys):
    """Three epochs of 40 batches are done; reading them again takes as long as it takes."""
    read = []

    def batches(last, at=None):
        for i in range(last):
            if i == at:
                os.kill(os.getpid(), signal.SIGINT)
            read.append(i)
            yield rows(7)

    def fit(data, epochs):
        resumed_fit.completed.clear()  # as in a new process
        fits.model.fit(
            data, epochs=epochs, steps_per_epoch=40, verbose=0, callbacks=[towers.Resume(tmp_path)]
        )

    fit(batches(1000), 3)
    read.clear()
    with pytest.raises(KeyboardInterrupt):
        fit(batches(1000, at=20), 4)
    assert len(read) < 100 and "saved at step 120: the same script" in capsys.readouterr().out
    with pytest.raises(ValueError, match="^x ends after 90 batches"):
        fit(batches(90), 4)


def test_callbacks_are_called_only_for_the_remaining_steps(model, tmp_path):
    recorders = []

    def callbacks():
        recorders.append(Recorder())
        return recorders[-1:]

    fits = Fits(model, *rows(), callbacks=callbacks)
    fits.interrupted(tmp_path, [6])
    first, last = ([event[:2] for event in each.events] for each in recorders)
    left = [("begin", 2), ("end", 2), ("begin", 3), ("end", 3)]
    assert last == [("epoch", 1), *left, ("logs", 1)]
    assert first[-2:] == [("end", 1), ("begin", 2)]


@pytest.mark.parametrize(
    "every, seconds, expected",
    [
        (3, 0.0, ["epoch-0-step-3", "epoch-1-step-4", "epoch-1-step-6"]),
        (None, 600.0, ["epoch-0-step-0", "epoch-1-step-4"]),
        (None, 0.0, ["epoch-1-step-5", "epoch-1-step-6", "epoch-1-step-7"]),
    ],
)
def test_it_saves_after_so_many_steps_or_seconds_and_each_epoch(
    model, every, seconds, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpointer, "SECONDS_BETWEEN_SAVES", seconds)
    with pytest.raises(InterruptedError):
        Fits(model, *rows()).fit(tmp_path, after=7, every=every)
    found = checkpoints.find(tmp_path / "checkpoints")
    assert [path.name for path in reversed(found)] == expected


def test_a_file_and_a_directory_of_another_fit_are_errors(fits, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="^directory .*file.* cannot be used: Not a directory"):
        fits.fit(tmp_path / "file")
    fits.fit(tmp_path, epochs=1)
    for options, words in [
        ({"batch_size": 5}, "another fit: batch_size .7 then, 5 now."),
        ({"shuffle": False}, "shuffle .True then, False now."),
        ({"steps_per_epoch": 2}, "steps_per_epoch .None then, 2 now."),
    ]:
        with pytest.raises(ValueError, match=words):
            Fits(fits.model, *rows()).fit(tmp_path, **options)
    other = towers.make_parallel(keras.Sequential(fits.model.layers), 2, num_towers=2)
    adam = keras.optimizers.Adam.from_config(fits.model.optimizer.get_config())
    other.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
    with pytest.raises(ValueError, match="another fit: num_towers .3 then, 2 now."):
        other.fit(*rows(), batch_size=7, verbose=0, callbacks=[towers.Resume(tmp_path)])


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_a_second_fit_of_a_process_in_a_directory_is_an_error(model, kind, tmp_path):
    """It would begin with the weights of the first. A larger initial_epoch asks for that."""
    resumed_fit.completed.clear()
    data = {
        "arrays": rows(),
        "dataset": [tf.data.Dataset.from_tensor_slices(rows()).batch(7)],
    }[kind]

    def fit(epochs, directory=tmp_path / "run", **options):
        batch_size = None if len(data) == 1 else 7
        callbacks = [towers.Resume(directory), *options.pop("callbacks", [])]
        history = model.fit(
            *data, batch_size=batch_size, epochs=epochs, verbose=0, callbacks=callbacks, **options
        )
        return len(history.epoch), int(model.optimizer.iterations)

    with pytest.raises(InterruptedError):
        fit(1, callbacks=[Interrupt(2)])
    num_epochs, steps = fit(1)  # an interrupted fit is not complete
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for epochs, directory in [(1, "run"), (3, "run"), (1, "link")]:
        with pytest.raises(ValueError, match=r"^directory .* has completed.*initial_epoch=1\.$"):
            fit(epochs, tmp_path / directory)
    fit(1, tmp_path / "other")
    assert fit(2, initial_epoch=1) == (num_epochs + 1, steps + 4)
    with pytest.raises(ValueError, match="initial_epoch=2"):
        fit(2, initial_epoch=1)


@pytest.mark.parametrize(
    "state, words",
    [
        ({"position": {}, "config": {}}, "holds the checkpoints of a run of train.py"),
        ({"position": {}, "fit": {}}, "is no checkpoint of a fit"),
    ],
)
def test_a_checkpoint_of_something_else_is_an_error(fits, state, words, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    path = checkpoints.path_of(tmp_path / "checkpoints", 0, 0)
    checkpoints.write(path, checkpoints.Checkpoint(state, {}))
    with pytest.raises(ValueError, match=words):
        fits.fit(tmp_path)


def test_fit_has_the_arguments_of_keras():
    (_, *keras_own), ours = (
        list(inspect.signature(f).parameters.values())
        for f in (keras.Model.fit, resumed_fit.fit_arguments)
    )
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in keras_own]


def test_noise_whose_state_cannot_be_saved_is_warned_of(tmp_path):
    x, y, _ = random_rows(8, np.random.default_rng(0))
    model = noisy("drawn")
    model.build((None, 6))
    parallel = towers.make_parallel(model, 2)
    parallel.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="draws noise by tf.random.*keras.random"):
        parallel.fit(x, y, verbose=0, callbacks=[towers.Resume(tmp_path)])
