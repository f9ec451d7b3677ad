"""keras.remat in towers: the results of one device, in less memory."""

import contextlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parallel.pairs import assert_close
from towers.machine import devices
from towers.divide.tower_step import TowerStep

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


def plain(remat):
    inner = [L.Dense(6, activation="gelu"), L.Dense(6, activation="tanh")]
    return keras.Sequential([keras.Input((6,)), Block(inner, remat), L.Dense(3)])


def masked(remat):
    """Keras' own layers, with keywords and masks, in a RematScope."""
    with keras.RematScope("full") if remat else contextlib.nullcontext():
        x = keras.Input((6,))
        tokens = L.Lambda(lambda x: tf.cast(tf.abs(x) * 3, tf.int32))(x)
        rows = L.Embedding(30, 4, mask_zero=True)(tokens)
        return keras.Model(x, L.Dense(3)(L.LSTM(4)(rows)))


def looped(remat):
    """A part inside of a loop's graph, which captures its parameters."""

    class Looped(Block):
        def call(self, x):
            def again(i, h):
                return i + 1, super(Looped, self).call(h)

            return tf.while_loop(lambda i, h: i < 3, again, (0, x), maximum_iterations=3)[1]

    return keras.Sequential([keras.Input((6,)), Looped([L.Dense(6)], remat), L.Dense(3)])


def batch(size=19):
    rng = np.random.default_rng(size)
    return rng.normal(size=(size, 6)), rng.normal(size=(size, 3))


def trained(build, remat, **options):
    """All variables after 3 steps of 2 towers."""
    keras.utils.set_random_seed(1)
    model = build(remat)
    step = TowerStep(
        model,
        keras.optimizers.SGD(0.1, momentum=0.9),
        "mse",
        devices=devices.tower_devices(2, "cpu"),
        **options,
    )
    for _ in range(3):
        step.train_batch(*batch())
    return [v.numpy() for v in model.variables]


@pytest.mark.telling("noisy")
@pytest.mark.filterwarnings("ignore:.*could not be tried")  # masks of made-up tokens
@pytest.mark.parametrize("build", [noisy, masked, looped])
def test_recomputed_results_are_those_of_one_device(build, float64):
    keras.utils.set_random_seed(1)
    model = build(True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    for _ in range(3):
        model.train_on_batch(*batch())
    assert_close(trained(build, True), [v.numpy() for v in model.variables], 1e-10)


@pytest.mark.matrix
def test_half_precision_is_kept():
    """Outside of its layer, a part would be computed again in float32."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        np.testing.assert_equal(trained(plain, True), trained(plain, False))
    finally:
        keras.config.set_dtype_policy("float32")


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
