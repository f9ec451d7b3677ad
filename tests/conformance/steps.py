"""What the tests of own steps share: small models whose step is a function, and how to run them."""

import keras
import numpy as np
import tensorflow as tf

import towers

L = keras.layers


def layers():
    return [keras.Input((4,), name="rows"), L.Dense(3, name="hidden"), L.Dense(2, name="last")]


def model_with(step, method="train_step"):
    """A compiled Sequential, 4 numbers -> 2, with a step of its own: (model, data) -> logs."""
    cls = type("Own", (keras.Sequential,), {method: step})
    model = cls(layers(), name="own")
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    return model


def pairs(count=11):
    """x [N, 4], y [N, 2]."""
    rng = np.random.default_rng(count)
    return rng.normal(size=(count, 4)), rng.normal(size=(count, 2))


def fit(model, *data, batch_size=11, **options):
    """The history of one epoch, in the order of the rows."""
    data = data or pairs()
    return model.fit(*data, batch_size=batch_size, shuffle=False, verbose=0, **options).history


def update(model, tape, loss):
    """One step of the model's optimizer on the loss that the tape has seen."""
    weights = model.trainable_weights
    model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))


def step_of(loss_of):
    """A step that minimizes loss_of(model, x, y), and returns it as "loss"."""

    def step(model, data):
        with tf.GradientTape() as tape:
            loss = loss_of(model, *data[:2])
        update(model, tape, loss)
        return {"loss": loss}

    return step


def mean_square(model, x, y):
    return tf.reduce_mean((model(x) - y) ** 2)


def fit_alike(make, *data, num_towers=4, eagerly=True, **options):
    """(by Keras, on towers): the trained models; their histories and weights agree."""
    trained, histories = [], []
    for on_towers in (False, True):
        keras.utils.set_random_seed(5)
        model = make()
        if on_towers:
            model = towers.make_parallel(model, min(2, num_towers), num_towers=num_towers)
        else:
            model.run_eagerly = eagerly  # sooner than traced, to the same values
        histories.append(fit(model, *data, **options))
        trained.append(model)
    assert list(histories[0]) == list(histories[1])
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-10, err_msg=name)
    for theirs, ours in zip(*(model.variables for model in trained), strict=True):
        np.testing.assert_allclose(
            ours.numpy(), theirs.numpy(), rtol=1e-10, atol=1e-11, err_msg=ours.path
        )
    return trained
