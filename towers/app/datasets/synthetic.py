"""Makes random examples of any shape in memory, to benchmark the computation without files."""

import math

import numpy as np

from towers.app.datasets.dataset import Arrays, Dataset


def load(input_shape: tuple[int, ...], num_classes: int) -> Dataset:
    """Makes noise around one random prototype for each class, so that training lowers the loss.

    `x = (prototype[y] + noise) / 2`, both uniform in [0, 1): float32 [N, *input_shape]; y: int32
    [N]. Equal arguments give bit-identical examples. There are 8,192 training and 1,024 test
    examples, or fewer if they would take more than 1 GiB and 128 MiB.
    """
    if min(*input_shape, num_classes) < 1:
        raise ValueError(
            f"dataset=synthetic: input_shape ({input_shape}) and num_classes ({num_classes}) must "
            "be at least 1."
        )
    num_bytes = 4 * math.prod(input_shape)
    num_train = min(8192, max(1, 2**30 // num_bytes))
    num_test = min(1024, max(1, 2**27 // num_bytes))
    prototypes = np.random.default_rng((0, 0)).random((num_classes, *input_shape), np.float32)
    train = make_split(prototypes, num_train, np.random.default_rng((0, 1)))
    test = make_split(prototypes, num_test, np.random.default_rng((0, 2)))
    return Dataset("synthetic", train, test, num_classes, tuple(input_shape))


def make_split(prototypes: np.ndarray, count: int, generator: np.random.Generator) -> Arrays:
    """Returns `count` examples around the prototypes."""
    y = generator.integers(len(prototypes), size=count, dtype=np.int32)
    x = generator.random((count, *prototypes.shape[1:]), np.float32)
    for example, label in zip(x, y, strict=True):  # prototypes[y] would need as much memory as x
        example += prototypes[label]
        example *= 0.5
    return x, y
