"""Models with a train_step of their own, as people write them, with noise taken from the data.

Noise that a step draws differs between towers and the large batch by design; it has tests of its
own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towers

L = keras.layers
ops = keras.ops


@dataclass(frozen=True)
class OwnCase:
    """name; make() -> compiled model; data(n, rng) -> the first arguments of `fit`."""

    name: str
    make: Callable[[], keras.Model]
    data: Callable[[int, np.random.Generator], tuple]

    def __str__(self) -> str:
        return self.name


def _net(inputs: int, outputs: int, **options: Any) -> keras.Model:
    return keras.Sequential(
        [keras.Input((inputs,)), L.Dense(5, activation="tanh"), L.Dense(outputs, **options)]
    )


def _compiled(model: keras.Model, *args: Any, **options: Any) -> keras.Model:
    model.compile(*args, jit_compile=False, **options)
    return model


def _pairs(first: int, second: int) -> Callable:
    def data(n: int, rng: np.random.Generator) -> tuple:
        return rng.normal(size=(n, first)), rng.normal(size=(n, second))

    return data


_REAL_AND_NOISE = _pairs(4, 3)
_ROWS = _pairs(4, 2)


class GAN(keras.Model):
    """Two optimizers, one after the other, and two running means."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator, self.generator = _net(4, 1), _net(3, 4)
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.d_optimizer = keras.optimizers.Adam(0.01)
        self.g_optimizer = keras.optimizers.RMSprop(0.02)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self) -> list:
        return [self.d_loss, self.g_loss]

    def train_step(self, data: Any) -> dict:
        real, noise = data
        n = tf.shape(real)[0]
        labels = tf.concat([ops.ones([n, 1]), ops.zeros([n, 1])], axis=0)
        images = tf.concat([real, self.generator(noise)], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))
        with tf.GradientTape() as tape:
            fake = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.ones([n, 1]), fake)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


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
                    self.discriminator(real))
                d_loss += 10.0 * penalty
            gradients = tape.gradient(d_loss, weights)
            self.d_optimizer.apply_gradients(zip(gradients, weights))
        for weight in weights:
            weight.assign(tf.clip_by_value(weight, -0.4, 0.4))
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}


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
        d_weights = self.discriminator.trainable_weights
        g_gradients = tape.gradient(g_loss, g_weights)
        d_gradients = tape.gradient(d_loss, d_weights)
        self.d_optimizer.apply_gradients(zip(d_gradients, d_weights))
        self.g_optimizer.apply_gradients(zip(g_gradients, g_weights))
        return {"d_loss": d_loss, "g_loss": g_loss}


class VAE(keras.Model):
    """As in Keras' guide: a loss of two parts, trackers, a test_step and a predict_step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _net(4, 6), _net(3, 4)
        self.total = keras.metrics.Mean(name="loss")
        self.kl = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list:
        return [self.total, self.kl]

    def losses_of(self, data: Any) -> tuple:
        x, noise = data
        mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
        output = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
        reconstruction = ops.mean(ops.sum(ops.square(x - output), axis=1))
        kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        kl = ops.mean(ops.sum(kl, axis=1))
        return reconstruction + kl, kl

    def train_step(self, data: Any) -> dict:
        with tf.GradientTape() as tape:
            loss, kl = self.losses_of(data)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return self._track(loss, kl)

    def test_step(self, data: Any) -> dict:
        return self._track(*self.losses_of(data))

    def predict_step(self, data: Any) -> Any:
        mean, _ = tf.split(self.encoder(data[0]), 2, axis=1)
        return {"code": mean, "output": self.decoder(mean)}

    def _track(self, loss: Any, kl: Any) -> dict:
        self.total.update_state(loss)
        self.kl.update_state(kl)
        return {m.name: m.result() for m in self.metrics}


class Distiller(keras.Model):
    """A frozen teacher, compiled metrics over the student's predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = _net(4, 3), _net(4, 3)
        self.teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> dict:
        x, y = data
        soft = tf.nn.softmax(self.teacher(x, training=False) / 3.0)
        with tf.GradientTape() as tape:
            logits = self.student(x, training=True)
            loss = 0.1 * self.compute_loss(x, y, logits)
            loss += keras.losses.KLDivergence()(soft, tf.nn.softmax(logits / 3.0)) * 9.0
        weights = self.student.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, logits)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data: Any) -> dict:
        x, y = data
        return self.compute_metrics(x, y, self.student(x, training=False), None)


def _distiller() -> keras.Model:
    model = Distiller()
    model.build((None, 4))
    return _compiled(
        model, "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
    )


def _classes(n: int, rng: np.random.Generator) -> tuple:
    return rng.normal(size=(n, 4)), rng.integers(0, 3, n)


class CallsSuper(keras.Sequential):
    """Keras' own step, and something beside it."""

    def train_step(self, data: Any) -> dict:
        logs = super().train_step(data)
        return {**logs, "twice": 2.0 * logs["loss"]}


def _calls_super() -> keras.Model:
    layers = [keras.Input((4,)), L.Dense(5, activation="tanh", kernel_regularizer="l2"), L.Dense(2)]
    return _compiled(CallsSuper(layers), "adam", "mse", metrics=["mae"])


class Unreduced(keras.Sequential):
    """A loss for each row, weighted by the user, and logs that are plain means."""

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            each = tf.reduce_mean((self(x, training=True) - y) ** 2, axis=1)
            weighted = each * tf.exp(y[:, 0])
        gradients = tape.gradient(weighted, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": tf.reduce_mean(each)}


def _unreduced() -> keras.Model:
    layers = [keras.Input((4,)), L.Dense(5, activation="tanh"), L.Dense(2)]
    return _compiled(Unreduced(layers), keras.optimizers.SGD(0.01))


class ClipsAndAverages(keras.Model):
    """Clipping by the global norm, and an exponential moving average of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.slow = _net(4, 2), _net(4, 2)
        self.slow.trainable = False

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            target = y + 0.1 * self.slow(x)
            loss = tf.reduce_mean((self.online(x) - target) ** 2)
        gradients = tape.gradient(loss, self.online.trainable_weights)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.online.trainable_weights))
        for slow, online in zip(self.slow.weights, self.online.weights):
            slow.assign(0.9 * slow + 0.1 * online)
        return {"loss": loss, "norm": norm}


class SharpnessAware(keras.Sequential):
    """SAM: the gradient at weights moved uphill, applied to the weights where they were."""

    def train_step(self, data: Any) -> dict:
        x, y = data
        weights = self.trainable_weights
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        moves = [0.05 * g / (norm + 1e-12) for g in gradients]
        for weight, move in zip(weights, moves):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            uphill = tf.reduce_mean((self(x) - y) ** 2)
        gradients = tape.gradient(uphill, weights)
        for weight, move in zip(weights, moves):
            weight.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, weights))
        return {"loss": loss, "uphill": uphill}


class SimCLR(keras.Model):
    """A contrastive loss over the embeddings of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _net(4, 3)
        self.accuracy = keras.metrics.Mean(name="contrast_accuracy")

    @property
    def metrics(self) -> list:
        return [self.accuracy]

    def train_step(self, data: Any) -> dict:
        left, right = data
        with tf.GradientTape() as tape:
            a = towers.gather(tf.math.l2_normalize(self.encoder(left), axis=1))
            b = towers.gather(tf.math.l2_normalize(self.encoder(right), axis=1))
            similar = tf.matmul(a, b, transpose_b=True) / 0.2
            labels = tf.range(tf.shape(a)[0])
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(labels, similar, from_logits=True))
            loss += tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(
                labels, tf.transpose(similar), from_logits=True))
        gradients = tape.gradient(loss, self.encoder.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.encoder.trainable_weights))
        found = tf.argmax(similar, axis=1, output_type=tf.int32)
        self.accuracy.update_state(tf.cast(found == labels, similar.dtype))
        return {"loss": loss, "contrast_accuracy": self.accuracy.result()}


class OwnSequential(keras.Sequential):
    """A plain step, written out."""

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"loss": loss}


def _recurrent() -> keras.Model:
    layers = [keras.Input((6,), dtype="int32"), L.Embedding(9, 4), L.LSTM(3), L.Dense(2)]
    return _compiled(OwnSequential(layers), "adam", "mse")


def _words(n: int, rng: np.random.Generator) -> tuple:
    return rng.integers(0, 9, (n, 6)).astype("int32"), rng.normal(size=(n, 2))


class Physics(keras.Model):
    """u'' = f by nested tapes, and u given at the rows of y."""

    def __init__(self) -> None:
        super().__init__()
        self.u = _net(1, 1)

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    u = self.u(x)
                du = inner.gradient(u, x)
            ddu = outer.gradient(du, x)
            residual = tf.reduce_mean((ddu + tf.sin(x)) ** 2)
            edge = tf.reduce_mean((self.u(y) - y) ** 2)
            loss = residual + edge
        gradients = tape.gradient(loss, self.u.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.u.trainable_weights))
        return {"loss": loss, "residual": residual}


class MetaLearner(keras.Model):
    """MAML: the gradient through an inner update, which is over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(4, 2), name="kernel", initializer="glorot_uniform")

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner_loss = tf.reduce_mean((tf.matmul(x, self.kernel) - y) ** 4)
            fast = self.kernel - 0.1 * inner.gradient(inner_loss, self.kernel)
            loss = tf.reduce_mean((tf.matmul(x[:, ::-1], fast) - y) ** 2)
        gradient = outer.gradient(loss, self.kernel)
        self.optimizer.apply_gradients([(gradient, self.kernel)])
        return {"loss": loss, "inner_loss": inner_loss}


class FastWeights(MetaLearner):
    """The same with the inner gradient taken of tensors that are no variables."""

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as outer:
            fast = tf.identity(self.kernel)
            for _ in range(2):
                with tf.GradientTape() as inner:
                    inner.watch(fast)
                    inner_loss = tf.reduce_mean((tf.matmul(x, fast) - y) ** 4)
                fast = fast - 0.05 * inner.gradient(inner_loss, fast)
            loss = tf.reduce_mean((tf.matmul(x[:, ::-1], fast) - y) ** 2)
        gradient = outer.gradient(loss, self.kernel)
        self.optimizer.apply_gradients([(gradient, self.kernel)])
        return {"loss": loss, "inner_loss": inner_loss}


class Scaled(keras.Sequential):
    """LossScaleOptimizer."""

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"loss": loss, "scale": self.optimizer.dynamic_scale}


def _scaled() -> keras.Model:
    layers = [keras.Input((4,)), L.Dense(5, activation="tanh"), L.Dense(2)]
    inner = keras.optimizers.SGD(0.1)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8, dynamic_growth_steps=3)
    return _compiled(Scaled(layers), optimizer)


class SumOfRows(keras.Sequential):
    """A plain sum over the batch as the loss: tf.reduce_sum is known for what it is."""

    def train_step(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"rows": tf.reduce_mean(y)}


def _sequential(cls: type, optimizer: Any) -> Callable:
    def make() -> keras.Model:
        layers = [keras.Input((4,)), L.Dense(5, activation="tanh"), L.Dense(2)]
        return _compiled(cls(layers), optimizer())

    return make


def _plain(cls: type, **options: Any) -> Callable:
    return lambda: _compiled(cls(), **options)


OWN = [
    OwnCase("gan", _plain(GAN), _REAL_AND_NOISE),
    OwnCase("wgan_gp", _plain(WassersteinGAN), _REAL_AND_NOISE),
    OwnCase("persistent_tape", _plain(PersistentTape), _REAL_AND_NOISE),
    OwnCase("vae", _plain(VAE, optimizer="adam"), _pairs(4, 3)),
    OwnCase("distillation", _distiller, _classes),
    OwnCase("calls_super", _calls_super, _ROWS),
    OwnCase("unreduced", _unreduced, _ROWS),
    OwnCase("clips_and_averages", _plain(ClipsAndAverages, optimizer="adam"), _ROWS),
    OwnCase("sam", _sequential(SharpnessAware, lambda: "adam"), _ROWS),
    OwnCase("simclr", _plain(SimCLR, optimizer="adam"), _pairs(4, 4)),
    OwnCase("embedding_lstm", _recurrent, _words),
    OwnCase("pinn", _plain(Physics, optimizer="adam"), _pairs(1, 1)),
    OwnCase("maml", _plain(MetaLearner, optimizer="sgd"), _ROWS),
    OwnCase("fast_weights", _plain(FastWeights, optimizer="sgd"), _ROWS),
    OwnCase("loss_scale", _scaled, _ROWS),
    OwnCase("sum_of_rows", _sequential(SumOfRows, lambda: keras.optimizers.SGD(1e-3)), _ROWS),
]
