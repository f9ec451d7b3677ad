"""Exports the built-in data sets under a public name; their code is in towers/app/datasets."""

from towers.app import datasets as _datasets
from towers.app.datasets import (
    Dataset,
    NAMES,
    check_arrays,
    cifar10,
    fashion_mnist,
    image_folder,
    load,
    mnist,
    music,
    npz,
    num_examples,
    synthetic,
)

__all__ = [
    "NAMES",
    "Dataset",
    "check_arrays",
    "cifar10",
    "fashion_mnist",
    "image_folder",
    "load",
    "mnist",
    "music",
    "npz",
    "num_examples",
    "synthetic",
]
__path__ = _datasets.__path__  # so that towers.datasets.mnist can be imported
