"""Makes random examples of any shape in memory, to benchmark the computation without files."""

import math

import numpy as np

from towers.app.datasets.dataset import Arrays, Dataset


def load(
    input_shape: tuple[int, ...],
    num_classes: int,
    num_train: int = 8192,
    num_test: int = 1024,
    seed: int = 0,
) -> Dataset:
    """Makes noise around one random prototype for each class, so that training lowers the loss.

    `x = (prototype[y] + noise) / 2`, both uniform in [0, 1): float32 [N, *input_shape]; y: int32
    [N]. Equal arguments give bit-identical examples; the test examples do not depend on num_train.

    num_train, num_test: fewer are made if they would take more than 1 GiB and 128 MiB.
    """
    num_bytes = 4 * max(1, math.prod(input_shape))
    num_train = min(num_train, max(1, 2**30 // num_bytes))
    num_test = min(num_test, max(1, 2**27 // num_bytes))
    if min(*input_shape, num_classes, num_train, num_test) < 1 or seed < 0:
        raise ValueError(
            f"dataset=synthetic: input_shape ({input_shape}), num_classes ({num_classes}), "
            f"num_train ({num_train}) and num_test ({num_test}) must be at least 1, and seed "
            f"({seed}) at least 0."
        )
    prototypes = np.random.default_rng((seed, 0)).random((num_classes, *input_shape), np.float32)
    train = make_split(prototypes, num_train, np.random.default_rng((seed, 1)))
    test = make_split(prototypes, num_test, np.random.default_rng((seed, 2)))
    return Dataset("synthetic", train, test, num_classes, tuple(input_shape))


def make_split(prototypes: np.ndarray, count: int, generator: np.random.Generator) -> Arrays:
    """Returns `count` examples around the prototypes."""
    y = generator.integers(len(prototypes), size=count, dtype=np.int32)
    x = generator.random((count, *prototypes.shape[1:]), np.float32)
    for example, label in zip(x, y, strict=True):  # prototypes[y] would need as much memory as x
        example += prototypes[label]
        example *= 0.5
    return x, y
