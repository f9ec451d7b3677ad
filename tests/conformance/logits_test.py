"""Saturated outputs: wherever the rows of towers are joined, a crossentropy sees the logits.

Behind a sigmoid or a softmax Keras finds the logits. From probabilities alone it clips at 1e-7, and
a confident mistake has almost no gradient.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.conformance.steps import step_of
from tests.parallel.pairs import assert_same_logs
from towers.machine.loss_internals import marked

L = keras.layers
CROSSENTROPIES = {  # activations: what Keras looks for is an attribute, or an operation
    "binary_crossentropy": ("sigmoid", tf.nn.sigmoid),
    "binary_focal_crossentropy": ("sigmoid",),
    "categorical_crossentropy": ("softmax",),
    "categorical_focal_crossentropy": ("softmax",),
    "sparse_categorical_crossentropy": ("softmax", tf.nn.softmax),
}
CASES = [(name, each) for name, activations in CROSSENTROPIES.items() for each in activations]
X = np.array([[-30.0], [1.0], [2.0], [-1.5], [40.0]])  # the first and the last are mistakes
CLASSES = np.array([1, 0, 1, 0, 0])


def labels(name):
    if name.startswith("sparse"):
        return CLASSES
    return CLASSES[:, np.newaxis] if name.startswith("binary") else np.eye(2)[CLASSES]


def network(name, activation, kind=keras.Sequential):
    kernel = np.array([[1.0]]) if name.startswith("binary") else np.array([[0.0, 1.0]])
    dense = L.Dense(kernel.shape[1], activation, kernel_initializer=lambda *_, **__: kernel)
    return kind([keras.Input((1,)), dense])


def ran(model, y, **options):
    """Logs of training and of evaluation, and the weights after one step."""
    model.compile(keras.optimizers.SGD(0.1), jit_compile=False, **options)
    logs = dict(model.fit(X, y, batch_size=len(X), shuffle=False, verbose=0).history)
    logs |= model.evaluate(X, y, batch_size=len(X), verbose=0, return_dict=True)
    return logs | {"weights": np.concatenate([w.ravel() for w in model.get_weights()])}


def ran_alike(make, y, num_towers=3, **options):
    """Logs of Keras' own model, which are those on towers, too.

    It runs eagerly, which is faster, unless only the graph has the logits.
    """
    plain = make()
    parallel = towers.make_parallel(make(), min(2, num_towers), num_towers=num_towers)
    is_keras = plain.layers[-1].activation in (keras.activations.sigmoid, keras.activations.softmax)
    logs = ran(plain, y, run_eagerly=is_keras, **options)
    assert_same_logs(ran(parallel, y, **options), logs)
    return logs


@pytest.mark.telling("3-root-binary_crossentropy-sigmoid0")
@pytest.mark.parametrize("name, activation", CASES)
@pytest.mark.parametrize("is_root", [True, False], ids=["root", "mse"])
@pytest.mark.parametrize("num_towers", [1, 3])
def test_losses_and_metrics_of_joined_rows_see_the_logits(
    name, activation, is_root, num_towers, float64
):
    """The root is not a mean, so that the rows of all towers are gathered for it."""
    if not is_root and name.startswith("sparse"):
        pytest.skip("mse would have labels of another shape")

    def root(y, y_pred):
        return tf.sqrt(tf.reduce_mean(keras.losses.get(name)(y, y_pred)))

    logs = ran_alike(lambda: network(name, activation), labels(name), num_towers,
                     loss=root if is_root else "mse", metrics=[getattr(keras.losses, name)])
    assert logs[name] > 1  # from clipped probabilities it is another value


def test_metrics_of_a_step_see_the_logits(float64):
    name = "binary_crossentropy"
    step = towers.TowerStep(network(name, "sigmoid"), "sgd", "mse", metrics=[name], num_towers=3,
                            devices=["/cpu:0"])
    y = labels(name)
    expected = float(tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y * 1.0, X)))
    np.testing.assert_allclose(step(X, y)[name], expected, rtol=1e-12)
    np.testing.assert_allclose(step.test_batch(X, y)[name], expected, rtol=0.1)


def gathered(y, y_pred):
    return keras.losses.BinaryCrossentropy()(towers.gather(y), towers.gather(y_pred))


def masked(y, y_pred):
    """A mask makes Keras divide by the number of rows that it leaves: they are gathered."""
    return keras.losses.BinaryCrossentropy()(y, marked(y_pred, {"mask": y[:, 0] > -1}))


@pytest.mark.telling("masked")
@pytest.mark.parametrize("loss_of", [gathered, masked])
def test_a_custom_step_gathers_the_logits_too(loss_of, float64):
    name = "binary_crossentropy"
    step = step_of(lambda model, x, y: loss_of(y, model(x, training=True)))
    kind = type("Own", (keras.Sequential,), {"train_step": step})
    ran_alike(lambda: network(name, "sigmoid", kind), labels(name), loss=name)
