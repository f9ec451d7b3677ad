"""Random examples of any shape, made on the fly: what a benchmark of the computation needs."""

import numpy as np

from towers.datasets.dataset import Dataset


def load(
    input_shape: tuple[int, ...],
    num_classes: int,
    num_train: int = 8192,
    num_test: int = 1024,
    seed: int = 0,
) -> Dataset:
    """Noise around one random prototype a class, so that the loss can fall.

    `x = (prototype[y] + noise) / 2`, both uniform in [0, 1). The same arguments give the same
    bits; test does not depend on num_train.

    Args:
        input_shape: the shape of one example.
        num_classes: labels lie in 0 ... num_classes - 1.
        num_train: examples to train on.
        num_test: examples to test on.
        seed: of the random generator, at least 0.

    Returns:
        x float32 [N, *input_shape] in [0, 1); y int32 [N].

    Raises:
        ValueError: a count is below 1, or the seed below 0.
    """
    for argument, value in (
        ("num_classes", num_classes),
        ("num_train", num_train),
        ("num_test", num_test),
        *(("input_shape", size) for size in input_shape),
    ):
        if value < 1:
            raise ValueError(f"--dataset=synthetic: {argument} ({value}) must be at least 1.")
    if seed < 0:
        raise ValueError(f"--dataset=synthetic: seed ({seed}) must be at least 0.")
    prototypes = np.random.default_rng((seed, 0)).random((num_classes, *input_shape), np.float32)
    train = _split(prototypes, num_train, np.random.default_rng((seed, 1)))
    test = _split(prototypes, num_test, np.random.default_rng((seed, 2)))
    return Dataset("synthetic", train, test, num_classes, tuple(input_shape))


def _split(
    prototypes: np.ndarray, count: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    y = generator.integers(len(prototypes), size=count, dtype=np.int32)
    x = generator.random((count, *prototypes.shape[1:]), np.float32)
    for example, label in zip(x, y, strict=True):  # prototypes[y] would take x's memory again
        example += prototypes[label]
        example *= 0.5
    return x, y
