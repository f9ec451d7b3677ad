"""Loads CIFAR-10, 50,000 training and 10,000 test images of 10 classes; Keras downloads it once."""

from towers.app.datasets.dataset import Dataset
from towers.app.datasets.fashion_mnist import downloaded


def load() -> Dataset:
    """Loads x, float32 [N, 32, 32, 3] in [0, 1], and y, int32 [N], 0 (airplane) ... 9 (truck)."""
    return downloaded("cifar10")
