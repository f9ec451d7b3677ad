"""What is measured: a model, its optimizer, its global batch and synthetic data for it."""

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np

from towers import models


@dataclass(frozen=True)
class Workload:
    """build() -> model; optimizer() -> Keras optimizer; batch_size is the global batch."""

    build: Callable[[], keras.Model]
    optimizer: Callable[[], keras.optimizers.Optimizer]
    batch_size: int
    input_shape: tuple[int, ...]
    num_classes: int
    steps: int

    def data(self, num_batches: int) -> tuple[np.ndarray, np.ndarray]:
        """Random images and labels: x float32 [N, ...], y int32 [N]."""
        rng = np.random.default_rng(0)
        count = num_batches * self.batch_size
        x = rng.random((count, *self.input_shape), dtype=np.float32)
        return x, rng.integers(0, self.num_classes, count).astype(np.int32)


def _built_in(name: str, optimizer: Callable, batch_size: int, steps: int) -> Workload:
    source = models.load(name)
    shape, classes = source.input_shape, source.num_classes
    return Workload(
        lambda: source.build(shape, classes), optimizer, batch_size, shape, classes, steps
    )


def resnet50() -> keras.Model:
    """`keras.applications` ResNet50 for 32x32 images, random weights."""
    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)


def momentum() -> keras.optimizers.Optimizer:
    """Plain SGD with momentum."""
    return keras.optimizers.SGD(0.01, momentum=0.9)


WORKLOADS = {
    "cnn": lambda: _built_in("cnn", momentum, 128, 60),
    "notebook_cnn": lambda: _built_in("notebook_cnn", keras.optimizers.RMSprop, 128, 6),
    "mlp": lambda: _built_in("mlp", keras.optimizers.Adam, 256, 60),
    "resnet50": lambda: Workload(resnet50, keras.optimizers.Adam, 64, (32, 32, 3), 10, 3),
}
