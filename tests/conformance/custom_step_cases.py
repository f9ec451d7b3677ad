"""Models with a train_step of their own, as people write them, with noise taken from the data.

Noise that a step draws differs between towers and the large batch by design; it has tests of its
own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import towers
from tests.conformance.gans import GAN, PersistentTape, Tracks, WassersteinGAN, network, update

L = keras.layers
ops = keras.ops


class OwnCase(NamedTuple):
    """name; make() -> compiled model; data(n, rng) -> the first arguments of `fit`."""

    name: str
    make: Callable[[], keras.Model]
    data: Callable[[int, np.random.Generator], tuple]

    def __str__(self) -> str:
        return self.name


def _compiled(model: keras.Model, *args: Any, **options: Any) -> keras.Model:
    model.compile(*args, jit_compile=False, **options)
    return model


def _pairs(first: int, second: int) -> Callable:
    def data(n: int, rng: np.random.Generator) -> tuple:
        return rng.normal(size=(n, first)), rng.normal(size=(n, second))

    return data


_REAL_AND_NOISE = _pairs(4, 3)
_ROWS = _pairs(4, 2)


class Minimizes(keras.Model):
    """Minimizes the "loss" of `losses_of(data)`, which are the logs, too."""

    def train_step(self, data: Any) -> dict:
        with tf.GradientTape() as tape:
            logs = self.losses_of(data)
        update(self.optimizer, tape, logs["loss"], self.trainable_weights)
        return logs


class VAE(Tracks, Minimizes):
    """As in Keras' guide: a loss of two parts, trackers, a test_step and a predict_step."""

    names = "loss", "kl_loss"

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(4, 6), network(3, 4)

    def losses_of(self, data: Any) -> dict:
        x, noise = data
        mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
        output = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
        reconstruction = ops.mean(ops.sum(ops.square(x - output), axis=1))
        kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        kl = ops.mean(ops.sum(kl, axis=1))
        return {"loss": reconstruction + kl, "kl_loss": kl}

    def train_step(self, data: Any) -> dict:
        return self.tracked(*super().train_step(data).values())

    def test_step(self, data: Any) -> dict:
        return self.tracked(*self.losses_of(data).values())

    def predict_step(self, data: Any) -> Any:
        mean, _ = tf.split(self.encoder(data[0]), 2, axis=1)
        return {"code": mean, "output": self.decoder(mean)}


class Distiller(keras.Model):
    """A frozen teacher, compiled metrics over the student's predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = network(4, 3), network(4, 3)
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
        update(self.optimizer, tape, loss, self.student.trainable_weights)
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
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
    return _compiled(model, "adam", loss, metrics=["accuracy", metric])


class CallsSuper(keras.Sequential):
    """Keras' own step, and something beside it."""

    def train_step(self, data: Any) -> dict:
        logs = super().train_step(data)
        return {**logs, "twice": 2.0 * logs["loss"]}


def _calls_super() -> keras.Model:
    model = CallsSuper([keras.Input((4,)), L.Dense(5, "tanh", kernel_regularizer="l2"), L.Dense(2)])
    return _compiled(model, "adam", "mse", metrics=["mae"])


class WrittenOut(Minimizes, keras.Sequential):
    """A plain step, written out."""

    def losses_of(self, data: Any) -> dict:
        x, y = data
        loss = self.compute_loss(x, y, self(x, training=True))
        return {"loss": loss, "rows": tf.reduce_mean(y)}  # Keras shows its own, of "loss" alone


class Scaled(WrittenOut):
    """LossScaleOptimizer."""

    def losses_of(self, data: Any) -> dict:
        loss = super().losses_of(data)["loss"]
        return {"loss": self.optimizer.scale_loss(loss), "plain": loss}

    def train_step(self, data: Any) -> dict:
        return {**super().train_step(data), "scale": self.optimizer.dynamic_scale}


def _loss_scale() -> Any:
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8, dynamic_growth_steps=3
    )


class ClipsAndAverages(keras.Model):
    """Clipping by the global norm, and an exponential moving average of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.slow = network(4, 2), network(4, 2)
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


class SimCLR(Tracks, Minimizes):
    """A contrastive loss over the embeddings of the whole batch."""

    names = ("contrast_accuracy",)

    def __init__(self) -> None:
        super().__init__()
        self.encoder = network(4, 3)

    def losses_of(self, data: Any) -> dict:
        a, b = (towers.gather(tf.math.l2_normalize(self.encoder(view), axis=1)) for view in data)
        similar, labels = tf.matmul(a, b, transpose_b=True) / 0.2, tf.range(tf.shape(a)[0])
        crossentropy = keras.losses.sparse_categorical_crossentropy
        loss = tf.reduce_mean(crossentropy(labels, similar, from_logits=True))
        loss += tf.reduce_mean(crossentropy(labels, tf.transpose(similar), from_logits=True))
        found = tf.argmax(similar, axis=1, output_type=tf.int32)
        return {"loss": loss, **self.tracked(tf.cast(found == labels, similar.dtype))}


class Physics(Minimizes):
    """u'' = f by nested tapes, and u given at the rows of y."""

    def __init__(self) -> None:
        super().__init__()
        self.u = network(1, 1)

    def losses_of(self, data: Any) -> dict:
        x, y = data
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                u = self.u(x)
            du = inner.gradient(u, x)
        residual = tf.reduce_mean((outer.gradient(du, x) + tf.sin(x)) ** 2)
        edge = tf.reduce_mean((self.u(y) - y) ** 2)
        return {"loss": residual + edge, "residual": residual}


class MetaLearner(Minimizes):
    """MAML: the gradient through an inner update, which is over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(4, 2), name="kernel", initializer="glorot_uniform")

    def losses_of(self, data: Any) -> dict:
        x, y = data
        fast, inner_loss = self.learnt(x, y)
        loss = tf.reduce_mean((tf.matmul(x[:, ::-1], fast) - y) ** 2)
        return {"loss": loss, "inner_loss": inner_loss}

    def learnt(self, x: Any, y: Any) -> tuple:
        with tf.GradientTape() as inner:
            inner_loss = tf.reduce_mean((tf.matmul(x, self.kernel) - y) ** 4)
        return self.kernel - 0.1 * inner.gradient(inner_loss, self.kernel), inner_loss


def _sequential(cls: type, optimizer: Any) -> Callable:
    return lambda: _compiled(cls(network(4, 2).layers), optimizer(), "mse")


def _plain(cls: type, **options: Any) -> Callable:
    return lambda: _compiled(cls(), **options)


OWN = [
    OwnCase("gan", _plain(GAN), _REAL_AND_NOISE),
    OwnCase("wgan_gp", _plain(WassersteinGAN), _REAL_AND_NOISE),
    OwnCase("persistent_tape", _plain(PersistentTape), _REAL_AND_NOISE),
    OwnCase("vae", _plain(VAE, optimizer="adam"), _REAL_AND_NOISE),
    OwnCase(
        "distillation", _distiller, lambda n, rng: (rng.normal(size=(n, 4)), rng.integers(0, 3, n))
    ),
    OwnCase("calls_super", _calls_super, _ROWS),
    OwnCase("clips_and_averages", _plain(ClipsAndAverages, optimizer="adam"), _ROWS),
    OwnCase("sam", _sequential(SharpnessAware, lambda: "adam"), _ROWS),
    OwnCase("simclr", _plain(SimCLR, optimizer="adam"), _pairs(4, 4)),
    OwnCase("pinn", _plain(Physics, optimizer="adam"), _pairs(1, 1)),
    OwnCase("maml", _plain(MetaLearner, optimizer="sgd"), _ROWS),
    OwnCase("loss_scale", _sequential(Scaled, _loss_scale), _ROWS),
]
