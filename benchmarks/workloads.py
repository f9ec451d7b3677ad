"""The workloads of the benchmarks: models with optimizers, global batches and random data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from benchmarks import dcgan
from examples import wide_mlp
from towers.app import models

CLASSES_LOSS, BINARY_LOSS = "sparse_categorical_crossentropy", "binary_crossentropy"


@dataclass(frozen=True)
class Workload:
    """A model to train and its settings.

    build: () -> a built model.
    optimizer: () -> a Keras optimizer.
    batch_size: the global batch.
    input_shape: the shape of one example.
    num_classes: labels are 0 ... num_classes - 1. For a single sigmoid, num_classes is 1 and the
        labels are 0 and 1.
    steps: number of steps that takes 4 to 8 seconds on 2 cores.
    towers_per_core: number of towers per core that trains the model fastest on CPUs. A second tower
        fills the gaps of the first, but large parameters make it expensive.
    label_shape: the shape of one example's labels.
    """

    build: Callable[[], keras.Model]
    optimizer: Callable[[], keras.optimizers.Optimizer]
    batch_size: int
    input_shape: tuple[int, ...]
    num_classes: int
    steps: int
    towers_per_core: int = 1
    label_shape: tuple[int, ...] = ()

    @property
    def loss(self) -> str:
        """The loss's name in Keras."""
        return BINARY_LOSS if self.num_classes == 1 else CLASSES_LOSS

    def data(self, num_batches: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns random x float32 [N, ...] and y int32 [N, *label_shape]; for a sigmoid, y is
        float32 [N, 1].
        """
        rng = np.random.default_rng(0)
        count = num_batches * self.batch_size
        x = rng.random((count, *self.input_shape), dtype=np.float32)
        if self.num_classes == 1:
            return x, rng.integers(0, 2, (count, 1)).astype(np.float32)
        return x, rng.integers(0, self.num_classes, (count, *self.label_shape)).astype(np.int32)


def built_in_workload(
    name: str, optimizer: Callable, batch_size: int, steps: int, towers_per_core: int = 1
) -> Workload:
    """Makes the workload of a model that train.py's --model accepts, at its default size."""
    source = models.load(name)
    shape, classes = source.input_shape, source.num_classes
    return Workload(
        lambda: source.build(shape, classes),
        optimizer,
        batch_size,
        shape,
        classes,
        steps,
        towers_per_core,
    )


def resnet50() -> keras.Model:
    """Builds ResNet50 of `keras.applications` for 32x32 images, with random weights."""
    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)


def gru(units: int) -> keras.Model:
    """Builds two GRU layers: one-hot notes float32 [N, 49, 128] -> probabilities [N, 128].

    With 256 units, the model has 724,096 parameters.
    """
    return keras.Sequential(
        [
            keras.Input((49, 128)),
            keras.layers.GRU(units, return_sequences=True),
            keras.layers.GRU(units),
            keras.layers.Dense(128, activation="softmax"),
        ]
    )


def gru_workload(units: int, batch_size: int, steps: int) -> Workload:
    """Makes a workload of `gru` with Adam."""
    return Workload(lambda: gru(units), keras.optimizers.Adam, batch_size, (49, 128), 128, steps)


def text() -> keras.Model:
    """Builds a classifier of texts of any length: words are 1 ... 4,999, and 0 is masked."""
    return keras.Sequential(
        [
            keras.Input((None,)),
            keras.layers.Rescaling(5000),  # the random data are in [0, 1)
            keras.layers.Embedding(5000, 64, mask_zero=True),
            keras.layers.Bidirectional(keras.layers.LSTM(64)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


def transformer() -> keras.Model:
    """Builds two decoder blocks of width 64: 32 tokens -> probabilities [N, 32, 500]."""
    layers = keras.layers
    tokens = keras.Input((32,))
    x = layers.Embedding(500, 64)(layers.Rescaling(500)(tokens))  # the random data are in [0, 1)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 16)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(x + attended)
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(128, "gelu")(x)))
    return keras.Model(tokens, layers.Dense(500, activation="softmax")(x))


class Block(keras.layers.Layer):
    """A residual block of four gelu layers of 512 units."""

    def __init__(self, remat: bool) -> None:
        """Args: remat: whether the backward pass recomputes the layers instead of storing them."""
        super().__init__()
        self.inner = [keras.layers.Dense(512, activation="gelu") for _ in range(4)]
        self._remat = remat

    def build(self, shape: tuple[int | None, ...]) -> None:
        for layer in self.inner:
            layer.build(shape)

    def call(self, x: Any) -> Any:
        return x + (keras.remat(self._inside) if self._remat else self._inside)(x)

    def _inside(self, x: Any) -> Any:
        for layer in self.inner:
            x = layer(x)
        return x


def blocks(remat: bool) -> keras.Model:
    """Builds eight blocks with 8.4 million parameters, with keras.remat or without."""
    return keras.Sequential(
        [
            keras.Input((512,)),
            *(Block(remat) for _ in range(8)),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


def tiny() -> keras.Model:
    """Builds a model of ten parameters for the tests."""
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])


def momentum() -> keras.optimizers.Optimizer:
    """Returns SGD with momentum."""
    return keras.optimizers.SGD(0.01, momentum=0.9)


def slow_adam() -> keras.optimizers.Optimizer:
    """Returns Adam with a learning rate of 1e-4."""
    return keras.optimizers.Adam(1e-4)


WORKLOADS = {
    "cnn": lambda: built_in_workload("cnn", momentum, 128, 120, 2),
    "notebook_cnn": lambda: built_in_workload("notebook_cnn", keras.optimizers.RMSprop, 128, 14, 2),
    "mlp": lambda: built_in_workload("mlp", keras.optimizers.Adam, 256, 180),
    "mlp41m": lambda: Workload(wide_mlp.build, slow_adam, 512, (wide_mlp.INPUTS,), 1, 20),
    "gru": lambda: gru_workload(256, 256, 24),
    "gru_small": lambda: gru_workload(128, 128, 80),
    "text": lambda: Workload(text, keras.optimizers.Adam, 64, (80,), 1, 100),
    "transformer": lambda: Workload(
        transformer, keras.optimizers.Adam, 32, (32,), 500, 200, label_shape=(32,)
    ),
    "dcgan": lambda: Workload(dcgan.DCGAN, dcgan.make_adam, 128, (28, 28, 1), 1, 12),
    "resnet50": lambda: Workload(resnet50, keras.optimizers.Adam, 64, (32, 32, 3), 10, 3),
    "blocks": lambda: Workload(lambda: blocks(False), momentum, 8192, (512,), 1, 2),
    "blocks_remat": lambda: Workload(lambda: blocks(True), momentum, 8192, (512,), 1, 2),
    "tiny": lambda: Workload(tiny, momentum, 8, (4,), 2, 2),
}
