"""What the tests of the everyday flags share: a run of train(), and the same by Keras alone."""

import zipfile

import keras
import numpy as np

import towers
from tests.app.run_test import NUM_CLASSES, config, small_data
from towers.app.datasets.batches import load_examples, shuffled_batches

BATCH, EPOCHS = 16, 2
EPOCH, STEPS = 4, 8  # updates: 50 examples are 3 x 16 + 2


def plain_model(input_shape, num_classes):
    """Its layers' names do not count the models that a process has made before."""
    return keras.Sequential([
        keras.Input(input_shape),
        keras.layers.Dense(8, activation="relu", name="body"),
        keras.layers.Dense(num_classes, activation="softmax", name="head"),
    ])


def named_model(input_shape, num_classes):
    """The same with BatchNormalization, whose statistics differ between towers."""
    return keras.Sequential([
        keras.Input(input_shape),
        keras.layers.Dense(8, activation="relu", name="body"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(num_classes, activation="softmax", name="head"),
    ])


def trained(**values):
    """The run's history, and its final model, whose file knows nothing of towers.

    Three towers, unless told otherwise.
    """
    if "accumulate" not in values:
        values = {"num_towers": 3, **values}
    history = towers.train(config(model="tests.everyday:plain_model", run_dir="run", **values))
    with zipfile.ZipFile("run/final.keras") as file:
        assert b"towers" not in file.read("config.json")
    return history, keras.saving.load_model("run/final.keras")


def by_keras(
    optimizer, loss="sparse_categorical_crossentropy", prepare=None, one_hot=False,
    class_weight=None,
):
    """Keras' fit on one device, in the order of examples of the same run: (history, model)."""
    train, (x_test, y_test) = small_data()
    examples = load_examples(train)
    keras.utils.set_random_seed(0)
    model = plain_model((NUM_CLASSES,), NUM_CLASSES)
    if prepare is not None:
        prepare(model)

    def labels(y):
        return np.eye(NUM_CLASSES, dtype="float32")[y] if one_hot else np.asarray(y)

    model.compile(optimizer, loss)
    losses = {"loss": [], "val_loss": []}
    for epoch in range(EPOCHS):
        values = [
            (model.train_on_batch(
                x, labels(y), class_weight=class_weight, return_dict=True)["loss"], len(y))
            for x, y in shuffled_batches(examples, BATCH, 0, epoch)
            if not model.reset_metrics()
        ]
        losses["loss"].append(sum(value * count for value, count in values) / 50)
        losses["val_loss"].append(
            model.evaluate(x_test, labels(y_test), verbose=0, return_dict=True)["loss"]
        )
    optimizer.finalize_variable_values(model.trainable_variables)
    return losses, model


def assert_same(run, expected, rtol=1e-5):
    """Losses and weights agree up to float32's rounding."""
    (history, model), (losses, theirs) = run, expected
    for name, values in losses.items():
        np.testing.assert_allclose(history[name], values, rtol=rtol, err_msg=name)
    for a, b in zip(model.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6, err_msg=a.path)
