"""Trains a variational autoencoder of MNIST digits, in which a layer adds a loss.

    python -m examples.autoencoder

The sampling layer draws noise and adds the Kullback-Leibler divergence to the reconstruction loss
(Kingma and Welling 2013, https://arxiv.org/abs/1312.6114). Each tower draws different noise. The
printed loss is in nats per image: about 135 after 3 epochs. examples/vae.py does the same with a
custom train_step.
"""

from typing import Any

import keras
import tensorflow as tf

import towers
from towers.datasets import mnist

L = keras.layers
GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without GPUs: logical CPU devices
EXAMPLES = 30_000
GLOBAL_BATCH = 128
EPOCHS = 3
LATENT = 8


@keras.saving.register_keras_serializable("towers_examples")
class Sampling(L.Layer):
    """(mean, log variance), each [N, LATENT] -> a sample; adds KL(N(mean, variance) || N(0, 1))."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seed = keras.random.SeedGenerator()

    def call(self, inputs: list) -> Any:
        mean, log_variance = inputs
        divergence = 0.5 * (mean**2 + keras.ops.exp(log_variance) - log_variance - 1.0)
        self.add_loss(keras.ops.mean(keras.ops.sum(divergence, axis=-1)))
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seed)
        return mean + keras.ops.exp(0.5 * log_variance) * noise


def reconstruction(image: Any, output: Any) -> Any:
    """Returns the cross-entropy of each image's pixels in nats, [N]."""
    pixels = keras.losses.binary_crossentropy(image, output)  # [N, 28, 28]
    return keras.ops.sum(pixels, axis=(1, 2))


def build() -> keras.Model:
    """Images float32 [N, 28, 28, 1] -> reconstructed images."""
    image = keras.Input((28, 28, 1))
    hidden = L.Dense(256, activation="relu")(L.Flatten()(image))
    code = Sampling()([L.Dense(LATENT)(hidden), L.Dense(LATENT)(hidden)])
    hidden = L.Dense(256, activation="relu")(code)
    return keras.Model(image, L.Reshape((28, 28, 1))(L.Dense(784, activation="sigmoid")(hidden)))


def main(examples: int = EXAMPLES, epochs: int = EPOCHS) -> dict[str, list[float]]:
    """Trains and evaluates; returns the history of `fit`."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    data = mnist.load()
    x, test = data.train[0][:examples], data.test[0][:examples]
    with tf.device("/cpu:0"):  # keeps the parameters in host memory
        model = build()
    parallel = towers.make_parallel(model, DEVICES)
    parallel.compile("adam", reconstruction)
    return parallel.fit(
        x, x, batch_size=GLOBAL_BATCH, epochs=epochs, verbose=2, validation_data=(test, test)
    ).history


if __name__ == "__main__":
    main()
