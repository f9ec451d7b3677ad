"""A DCGAN for 28x28 images, whose custom train_step makes two updates with two optimizers.

The layers and the optimizer follow Radford et al. 2016 (https://arxiv.org/abs/1511.06434), the
sizes follow TensorFlow's DCGAN tutorial: 2.3 million parameters in the generator, 0.2 million in
the discriminator.
"""

from typing import Any

import keras
import tensorflow as tf

L = keras.layers
CODE = 100


def build_generator() -> keras.Model:
    """Codes float32 [N, CODE] -> images [N, 28, 28, 1] in -1 ... 1."""
    layers: list[keras.Layer] = [
        keras.Input((CODE,)),
        L.Dense(7 * 7 * 256, use_bias=False),
        L.BatchNormalization(),
        L.LeakyReLU(0.2),
        L.Reshape((7, 7, 256)),
    ]
    for filters, strides in ((128, 1), (64, 2)):
        layers += [
            L.Conv2DTranspose(filters, 5, strides, padding="same", use_bias=False),
            L.BatchNormalization(),
            L.LeakyReLU(0.2),
        ]
    last = L.Conv2DTranspose(1, 5, 2, padding="same", use_bias=False, activation="tanh")
    return keras.Sequential([*layers, last], name="generator")


def build_discriminator() -> keras.Model:
    """Images [N, 28, 28, 1] -> logits [N, 1]."""
    layers: list[keras.Layer] = [keras.Input((28, 28, 1))]
    for filters in (64, 128):
        layers += [L.Conv2D(filters, 5, 2, padding="same"), L.LeakyReLU(0.2), L.Dropout(0.3)]
    return keras.Sequential([*layers, L.Flatten(), L.Dense(1)], name="discriminator")


class DCGAN(keras.Model):
    """Trains the discriminator and the generator on each batch of images."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = build_generator(), build_discriminator()
        self.seed = keras.random.SeedGenerator(0)
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")
        self.built = True

    def compile(
        self,
        optimizer: keras.optimizers.Optimizer,
        loss: Any = None,
        metrics: Any = None,
        jit_compile: bool | str = "auto",
    ) -> None:
        """Sets the optimizers.

        Args:
            optimizer: the discriminator's optimizer. The generator gets an equal one.
            loss, metrics: ignored, because the model has its own.
            jit_compile: argument of Keras' `compile`.
        """
        super().compile(optimizer, jit_compile=jit_compile)
        self.g_optimizer = type(optimizer).from_config(optimizer.get_config())
        # Under MirroredStrategy, only one optimizer can create its variables within a step.
        optimizer.build(self.discriminator.trainable_weights)
        self.g_optimizer.build(self.generator.trainable_weights)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The metrics that Keras resets before each epoch."""
        return [self.d_loss, self.g_loss]

    def train_step(self, data: Any) -> dict[str, Any]:
        """Updates both networks; labels in the data are ignored."""
        real, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        codes = keras.random.normal([tf.shape(real)[0], CODE], seed=self.seed)
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(codes, training=True)
            on_real = self.discriminator(real, training=True)
            on_fake = self.discriminator(fake, training=True)
            d_loss = cross_entropy(tf.ones_like(on_real), on_real)
            d_loss += cross_entropy(tf.zeros_like(on_fake), on_fake)
            g_loss = cross_entropy(tf.ones_like(on_fake), on_fake)
        for network, optimizer, loss in (
            (self.discriminator, self.optimizer, d_loss),
            (self.generator, self.g_optimizer, g_loss),
        ):
            weights = network.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def make_adam() -> keras.optimizers.Optimizer:
    """Returns Adam with the paper's beta_1 and the tutorial's learning rate."""
    return keras.optimizers.Adam(1e-4, beta_1=0.5)
