"""Trains SimCLR on MNIST, whose loss compares all examples of the global batch.

    python -m examples.contrastive

The model learns without labels to match two views of each image among all views of the batch (Chen
et al. 2020, https://arxiv.org/abs/2002.05709). Towers compute the embeddings of their examples. The
example trains with towers and with Keras on one device, and prints the test accuracy of a linear
classifier on the encoder's features: 0.88 for both, and 0.74 for an untrained encoder.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.datasets import mnist

L = keras.layers
GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without GPUs: logical CPU devices
EXAMPLES = 12_000
GLOBAL_BATCH = 256
EPOCHS = 4
TEMPERATURE = 0.2


def build_encoder() -> keras.Model:
    """Images [N, 28, 28, 1] -> features [N, 64]."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            L.Conv2D(16, 3, strides=2, activation="relu"),
            L.Conv2D(32, 3, strides=2, activation="relu"),
            L.Flatten(),
            L.Dense(64, activation="relu"),
        ],
        name="encoder",
    )


class SimCLR(keras.Model):
    """An encoder, and a projection that is needed only for training."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = build_encoder()
        self.projection = keras.Sequential(
            [keras.Input((64,)), L.Dense(64, activation="relu"), L.Dense(32)], name="projection"
        )
        self.mean = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The metrics that Keras resets before each epoch."""
        return [self.mean]

    def train_step(self, data: Any) -> dict[str, Any]:
        """Makes one update on two views of the images, each [N, 28, 28, 1]."""
        with tf.GradientTape() as tape:
            left, right = (self.embed(view) for view in data)
            similar = tf.matmul(left, right, transpose_b=True) / TEMPERATURE
            partners = tf.range(tf.shape(similar)[0])
            losses = [
                keras.losses.sparse_categorical_crossentropy(partners, logits, from_logits=True)
                for logits in (similar, tf.transpose(similar))
            ]
            loss = tf.reduce_mean(losses[0]) + tf.reduce_mean(losses[1])
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}

    def embed(self, images: Any) -> Any:
        """Images [N, 28, 28, 1] -> vectors of length 1, [N, 32]."""
        return tf.math.l2_normalize(self.projection(self.encoder(images)), axis=1)


def make_view(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shifts each image by up to 3 pixels, changes its brightness and blackens a square of it."""
    views = np.empty_like(images)
    for i, image in enumerate(images):
        views[i] = np.roll(image, rng.integers(-3, 4, 2), axis=(0, 1)) * rng.uniform(0.6, 1.4)
        top, left = rng.integers(0, 20, 2)
        views[i, top : top + 8, left : left + 8] = 0.0
    return views


def linear_probe(encoder: keras.Model, train: tuple, test: tuple) -> float:
    """Fits a linear classifier to the features by least squares; returns its test accuracy."""

    def features(images: np.ndarray) -> np.ndarray:
        x = encoder.predict(images, batch_size=1000, verbose=0)
        return np.concatenate([x, np.ones([len(x), 1])], axis=1)

    x, labels = features(train[0]), np.eye(10)[train[1]]
    weights = np.linalg.solve(x.T @ x + 1e-3 * np.eye(x.shape[1]), x.T @ labels)
    return float(np.mean(np.argmax(features(test[0]) @ weights, axis=1) == test[1]))


def main(examples: int = EXAMPLES, epochs: int = EPOCHS) -> dict[str, list[float]]:
    """Trains with towers and on one device; returns the history of `fit` with towers."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    data = mnist.load()
    train = tuple(part[:examples] for part in data.train)
    rng = np.random.default_rng(0)
    views = make_view(train[0], rng), make_view(train[0], rng)

    def fit(with_towers: bool, verbose: int) -> tuple[dict, keras.Model]:
        keras.utils.set_random_seed(0)
        with tf.device("/cpu:0"):  # keeps the parameters in host memory
            model = SimCLR()
        trained = towers.make_parallel(model, DEVICES) if with_towers else model
        trained.compile("adam")
        history = trained.fit(
            *views, batch_size=GLOBAL_BATCH, epochs=epochs, shuffle=False, verbose=verbose
        ).history
        return history, model.encoder

    with tf.device("/cpu:0"):
        untrained = build_encoder()
    history, encoder = fit(with_towers=True, verbose=2)
    _, one_device = fit(with_towers=False, verbose=0)
    accuracies = [
        linear_probe(model, train, data.test) for model in (encoder, one_device, untrained)
    ]
    print("linear probe: towers {:.4f}, one device {:.4f}, untrained {:.4f}".format(*accuracies))
    return history


if __name__ == "__main__":
    main()
