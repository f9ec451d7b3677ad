"""keras.remat in towers: the results of one device, in less memory."""

import subprocess
import sys

import keras
import numpy as np
import pytest

import towers
from tests.parallel.pairs import assert_close

L = keras.layers


class Block(L.Layer):
    """A residual block whose inner part is computed again.

    In its closure is `beside`; whether it trains, and its dtype, the part takes from the block.
    """

    def __init__(self, inner, remat, **options):
        super().__init__(**options)
        self.inner, self.beside, self.remat = inner, L.Dense(6), remat

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.beside.build(shape)
        for layer in self.inner:
            layer.build(shape)

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        beside = self.beside(x)

        def part(x):
            for layer in self.inner:
                x = layer(x)
            return x * beside * self.scale

        part = keras.remat(part) if self.remat else part
        return x + part(x)


def noisy(remat):
    """Dropout, statistics, a kernel that is assigned, and a block inside of a block."""
    inner = [
        L.BatchNormalization(),
        L.SpectralNormalization(L.Dense(6)),
        L.Dropout(0.3, seed=3),
        Block([L.Dense(6, activation="gelu", activity_regularizer="l2")], remat),
    ]
    return keras.Sequential([keras.Input((6,)), Block(inner, remat), L.Dense(3)])


def batch(size=19):
    rng = np.random.default_rng(size)
    return rng.normal(size=(size, 6)), rng.normal(size=(size, 3))


def test_recomputed_results_are_those_of_one_device(float64):
    def compiled():
        keras.utils.set_random_seed(1)
        model = noisy(remat=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
        return model

    theirs, ours = compiled(), towers.make_parallel(compiled(), 2)
    for model in (theirs, ours):
        for _ in range(3):
            model.train_on_batch(*batch())
    assert_close([v.numpy() for v in ours.variables], [v.numpy() for v in theirs.variables], 1e-10)


PEAK = """
import resource, sys
import keras, numpy as np
import towers
from tests.conformance.recomputed_test import Block

L = keras.layers
x = h = keras.Input((6,))
for _ in range(8):
    inner = [L.Dense(6, activation="gelu") for _ in range(6)]
    h = Block(inner, sys.argv[1] == "remat")(h)
model = towers.make_parallel(keras.Model(x, h), 1)
model.compile("sgd", "mse", jit_compile=False)
rows = np.ones((400_000, 6), np.float32)
model.train_on_batch(rows[:2], rows[:2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.train_on_batch(rows, rows)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.matrix
def test_a_step_takes_a_part_of_the_memory():
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", PEAK, how], stdout=subprocess.PIPE, text=True, check=True
            ).stdout.split()[-1]
        )
        for how in ("remat", "plain")
    ]
    assert peaks[0] < peaks[1] / 2
