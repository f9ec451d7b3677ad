"""Trains a variational autoencoder with a custom train_step, test_step and predict_step.

    python -m examples.vae

It follows Keras' guide (https://keras.io/examples/generative/vae). The printed losses are in nats
per image: after 5 epochs, the total is about 146 and the divergence about 9.
examples/autoencoder.py does the same with a layer that adds a loss.
"""

from typing import Any

import keras
import tensorflow as tf

import towers
from towers.datasets import mnist

L = keras.layers
ops = keras.ops
GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without GPUs: logical CPU devices
EXAMPLES = 30_000
GLOBAL_BATCH = 128
EPOCHS = 5
LATENT = 4


class VAE(keras.Model):
    """Images [N, 28, 28, 1] -> codes [N, LATENT] -> images."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                L.Flatten(),
                L.Dense(256, activation="relu"),
                L.Dense(2 * LATENT),
            ],
            name="encoder",
        )
        self.decoder = keras.Sequential(
            [
                keras.Input((LATENT,)),
                L.Dense(256, activation="relu"),
                L.Dense(784, activation="sigmoid"),
                L.Reshape((28, 28, 1)),
            ],
            name="decoder",
        )
        self.seed = keras.random.SeedGenerator()
        self.total = keras.metrics.Mean(name="loss")
        self.divergence = keras.metrics.Mean(name="divergence")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The metrics that Keras resets before each epoch."""
        return [self.total, self.divergence]

    def train_step(self, images: Any) -> dict[str, Any]:
        """Makes one update. Each tower draws different noise."""
        with tf.GradientTape() as tape:
            loss, divergence = self.compute_losses(images)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return self.update_metrics(loss, divergence)

    def test_step(self, images: Any) -> dict[str, Any]:
        """Computes the losses."""
        return self.update_metrics(*self.compute_losses(images))

    def predict_step(self, images: Any) -> Any:
        """Returns the means of the codes, [N, LATENT]."""
        mean, _ = ops.split(self.encoder(images), 2, axis=1)
        return mean

    def compute_losses(self, images: Any) -> tuple:
        """Returns (total loss, divergence), each the mean over the batch."""
        mean, log_variance = ops.split(self.encoder(images), 2, axis=1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed)
        output = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        pixels = keras.losses.binary_crossentropy(images, output)
        divergence = 0.5 * (mean**2 + ops.exp(log_variance) - log_variance - 1.0)
        divergence = ops.mean(ops.sum(divergence, axis=1))
        return ops.mean(ops.sum(pixels, axis=(1, 2))) + divergence, divergence

    def update_metrics(self, loss: Any, divergence: Any) -> dict[str, Any]:
        """Returns the means over the epoch."""
        self.total.update_state(loss)
        self.divergence.update_state(divergence)
        return {metric.name: metric.result() for metric in self.metrics}


def main(examples: int = EXAMPLES, epochs: int = EPOCHS) -> dict[str, list[float]]:
    """Trains and evaluates; returns the history of `fit`."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    data = mnist.load()
    x, test = data.train[0][:examples], data.test[0][:examples]
    with tf.device("/cpu:0"):  # keeps the parameters in host memory
        model = VAE()
    parallel = towers.make_parallel(model, DEVICES)
    parallel.compile("adam")
    history = parallel.fit(
        x, batch_size=GLOBAL_BATCH, epochs=epochs, verbose=2, validation_data=(test,)
    ).history
    codes = parallel.predict(test, verbose=0)
    print(f"standard deviations of {len(codes):,} codes: {codes.std(axis=0).round(2)}")
    return history


if __name__ == "__main__":
    main()
