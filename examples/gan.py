"""Trains a GAN that draws MNIST digits: a custom train_step with two optimizers.

    python -m examples.gan

It trains with the losses of Goodfellow et al. 2014 (https://arxiv.org/abs/1406.2661), with their
non-saturating loss for the generator. After each epoch, it writes 36 generated images to
runs/gan/epoch_1.png and so on: blobs after the first epoch, strokes after the second, and shapes
like digits after the sixth.
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.datasets import mnist

L = keras.layers
GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without GPUs: logical CPU devices
EXAMPLES = 20_000
GLOBAL_BATCH = 128
EPOCHS = 6
CODE = 32
GRID = 6
DIRECTORY = "runs/gan"


def build_generator() -> keras.Model:
    """Codes float32 [N, CODE] -> images [N, 28, 28, 1] in 0 ... 1."""
    return keras.Sequential(
        [
            keras.Input((CODE,)),
            L.Dense(7 * 7 * 32),
            L.Reshape((7, 7, 32)),
            L.BatchNormalization(),
            L.LeakyReLU(0.2),
            L.Conv2DTranspose(16, 4, strides=2, padding="same"),
            L.BatchNormalization(),
            L.LeakyReLU(0.2),
            L.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


def build_discriminator() -> keras.Model:
    """Images [N, 28, 28, 1] -> logits [N, 1], positive for images that seem real."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            L.Conv2D(16, 4, strides=2, padding="same"),
            L.LeakyReLU(0.2),
            L.Conv2D(32, 4, strides=2, padding="same"),
            L.LeakyReLU(0.2),
            L.Flatten(),
            L.Dropout(0.3),
            L.Dense(1),
        ],
        name="discriminator",
    )


class GAN(keras.Model):
    """Trains the discriminator, then the generator, on each batch of real images."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = build_generator(), build_discriminator()
        self.seed = keras.random.SeedGenerator()
        self.d_loss = keras.metrics.Mean(name="discriminator_loss")
        self.g_loss = keras.metrics.Mean(name="generator_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        """Sets the optimizers of the discriminator and of the generator."""
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The metrics that Keras resets before each epoch."""
        return [self.d_loss, self.g_loss]

    def train_step(self, real: Any) -> dict[str, Any]:
        """Updates both networks on a batch of real images."""
        cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        codes = keras.random.normal([tf.shape(real)[0], CODE], seed=self.seed)

        with tf.GradientTape() as tape:
            fake = self.generator(codes, training=True)
            on_real = self.discriminator(real, training=True)
            on_fake = self.discriminator(fake, training=True)
            d_loss = cross_entropy(0.9 * tf.ones_like(on_real), on_real)
            d_loss += cross_entropy(tf.zeros_like(on_fake), on_fake)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))

        with tf.GradientTape() as tape:
            fake = self.generator(codes, training=True)
            on_fake = self.discriminator(fake, training=True)
            g_loss = cross_entropy(tf.ones_like(on_fake), on_fake)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))

        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


class DrawGrid(keras.callbacks.Callback):
    """Writes the images of the same codes after each epoch."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.directory = Path(directory)
        self.codes = np.random.default_rng(0).normal(size=(GRID * GRID, CODE)).astype("float32")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        images = self.model.generator.predict(self.codes, verbose=0)
        grid = images.reshape(GRID, GRID, 28, 28).transpose(0, 2, 1, 3)
        grid = grid.reshape(GRID * 28, GRID * 28, 1)
        self.directory.mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(self.directory / f"epoch_{epoch + 1}.png", grid)


def main(
    examples: int = EXAMPLES, epochs: int = EPOCHS, directory: str = DIRECTORY
) -> dict[str, list[float]]:
    """Trains; returns the history of `fit`."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    x = mnist.load().train[0][:examples]
    with tf.device("/cpu:0"):  # keeps the parameters in host memory
        model = GAN()
    parallel = towers.make_parallel(model, DEVICES, batch_norm="average")
    parallel.compile(keras.optimizers.Adam(5e-4, 0.5), keras.optimizers.Adam(5e-4, 0.5))
    return parallel.fit(
        x, batch_size=GLOBAL_BATCH, epochs=epochs, verbose=2, callbacks=[DrawGrid(directory)]
    ).history


if __name__ == "__main__":
    main()
