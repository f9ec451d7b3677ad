"""GANs with a train_step of their own, as people write them, and what these cases share."""

from typing import Any

import keras
import tensorflow as tf

L = keras.layers
ops = keras.ops


def network(inputs: int, outputs: int) -> keras.Model:
    return keras.Sequential(
        [keras.Input((inputs,)), L.Dense(5, activation="tanh"), L.Dense(outputs)]
    )


def update(optimizer: Any, tape: tf.GradientTape, loss: Any, weights: list) -> None:
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))


class Tracks(keras.Model):
    """Has a running mean for each name."""

    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.means = [keras.metrics.Mean(name=name) for name in self.names]

    @property
    def metrics(self) -> list:
        return self.means

    def tracked(self, *values: Any) -> dict:
        for metric, value in zip(self.means, values):
            metric.update_state(value)
        return {metric.name: metric.result() for metric in self.means}


class GAN(Tracks):
    """Two optimizers, one after the other, and two running means."""

    names = "d_loss", "g_loss"

    def __init__(self) -> None:
        super().__init__()
        self.discriminator, self.generator = network(4, 1), network(3, 4)

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.d_optimizer = keras.optimizers.Adam(0.01)
        self.g_optimizer = keras.optimizers.RMSprop(0.02)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data: Any) -> dict:
        real, noise = data
        n = tf.shape(real)[0]
        labels = tf.concat([ops.ones([n, 1]), ops.zeros([n, 1])], axis=0)
        images = tf.concat([real, self.generator(noise)], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images))
        update(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            fake = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.ones([n, 1]), fake)
        update(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        return self.tracked(d_loss, g_loss)


class WassersteinGAN(GAN):
    """A gradient penalty, two critic updates, clipped weights."""

    def train_step(self, data: Any) -> dict:
        real, noise = data
        weights = self.discriminator.trainable_weights
        for mix in (0.3, 0.8):
            fake = self.generator(noise)
            with tf.GradientTape() as tape:
                between = mix * real + (1 - mix) * fake
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    scores = self.discriminator(between, training=True)
                slope = inner.gradient(scores, [between])[0]
                penalty = tf.reduce_mean((tf.norm(slope, axis=1) - 1.0) ** 2)
                d_loss = tf.reduce_mean(self.discriminator(fake)) - tf.reduce_mean(
                    self.discriminator(real)
                )
                d_loss += 10.0 * penalty
            update(self.d_optimizer, tape, d_loss, weights)
        for weight in weights:
            weight.assign(tf.clip_by_value(weight, -0.4, 0.4))
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.discriminator(self.generator(noise)))
        update(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
        return self.tracked(d_loss, g_loss)


class PersistentTape(GAN):
    """Both losses in one forward pass."""

    def train_step(self, data: Any) -> dict:
        real, noise = data
        with tf.GradientTape(persistent=True) as tape:
            real_scores = self.discriminator(real)
            fake_scores = self.discriminator(self.generator(noise))
            d_loss = self.loss_fn(tf.ones_like(real_scores), real_scores)
            d_loss += self.loss_fn(tf.zeros_like(fake_scores), fake_scores)
            g_loss = self.loss_fn(tf.ones_like(fake_scores), fake_scores)
        g_weights = self.generator.trainable_weights
        gradients = tape.gradient(g_loss, g_weights)
        update(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, g_weights))
        return self.tracked(d_loss, g_loss)
