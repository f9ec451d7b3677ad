"""Drawn programs, divided, do what Keras does on one device.

pytest tests/divide/drawn_test.py                                   a few of them
pytest -m matrix tests/divide/drawn_test.py                         200
TOWERS_DRAWN=2000 pytest -m matrix -n 0 tests/divide/drawn_test.py  2,000, about 3 hours
"""

import os
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import towers
from tests.divide.drawn_programs import BLOCKS, LAYERS, LOSSES, METRICS, OPTIMIZERS, STEPS, Block

MANY = int(os.environ.get("TOWERS_DRAWN", "200"))


class Program(NamedTuple):
    """parts: names of blocks and layers. num_rows: of each batch. weights: of the examples."""

    parts: list[str]
    loss: str
    metrics: str
    step: str
    optimizer: str
    weights: str
    num_rows: list[int]
    num_towers: int

    def model(self) -> keras.Model:
        """Builds and compiles it."""
        x = z = keras.Input((4,))
        for name in self.parts:
            for layer in [Block(name)] if name in BLOCKS else LAYERS[name]():
                z = layer(z)
        model = STEPS[self.step](x, keras.layers.Dense(3)(z))
        model.compile(
            OPTIMIZERS[self.optimizer](), LOSSES[self.loss](), jit_compile=False,
            weighted_metrics=METRICS[self.metrics](),
        )  # fmt: skip
        return model

    def batch(self, n: int) -> tuple:
        """x [n, 4], y [n, 3], and weights of the examples if there are any."""
        rng = np.random.default_rng(n)
        x, y = tf.constant(rng.normal(size=(n, 4))), tf.constant(np.eye(3)[rng.integers(0, 3, n)])
        if self.weights == "none":
            return x, y
        weight = rng.uniform(0.1, 2, n)
        return x, y, tf.constant(weight * (self.weights == "some" or rng.random(n) < 0.5))


def choice(table) -> st.SearchStrategy:
    return st.sampled_from(list(table))


PROGRAMS = st.builds(
    Program, st.lists(choice([*BLOCKS, *LAYERS]), max_size=4), choice(LOSSES), choice(METRICS),
    choice(STEPS), choice(OPTIMIZERS), choice(["none", "some", "zeros"]),
    st.lists(st.integers(1, 12), min_size=2, max_size=2), st.integers(2, 5),
)  # fmt: skip


def results(program: Program, on_towers: bool, eagerly: bool = False) -> dict[str, np.ndarray]:
    """Everything that two updates and an evaluation make."""
    keras.utils.set_random_seed(5)
    model = program.model()
    if on_towers:
        model = towers.make_parallel(
            model, min(program.num_towers, 3), num_towers=program.num_towers
        )
    else:
        model.run_eagerly = eagerly
    found = {}
    for i, n in enumerate(program.num_rows):
        found[f"train {i}"] = model.train_on_batch(*program.batch(n), return_dict=True)
    found["test"] = model.test_on_batch(*program.batch(program.num_rows[0]), return_dict=True)
    found = {f"{k} {name}": value for k, logs in found.items() for name, value in logs.items()}
    found.update(
        (f"{i} {v.path}", v) for i, v in enumerate([*model.variables, *model.optimizer.variables])
    )
    keras.utils.clear_session()
    return {name: np.asarray(value) for name, value in found.items()}


def assert_alike(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for (name, theirs), ours in zip(expected.items(), found.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-8, 1e-9, err_msg=name)


def compare(program: Program) -> None:
    expected = results(program, on_towers=False, eagerly=True)
    assume(all(np.isfinite(value).all() for value in expected.values()))
    found = results(program, on_towers=True)
    try:
        assert_alike(found, expected)  # Keras is sooner if it runs eagerly
    except AssertionError:  # such as a second gradient of MaxPool, which differs in a graph
        assert_alike(found, results(program, on_towers=False))


def drawn(number: int):
    """Draws this number of programs, the same ones in each run."""
    checks = [
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.filter_too_much,
    ]
    quiet = settings(
        max_examples=number, deadline=None, derandomize=True, suppress_health_check=checks
    )
    return lambda test: quiet(given(PROGRAMS)(test))


@drawn(5)
def test_drawn_programs_compute_what_one_device_would(float64, program):
    compare(program)


@pytest.mark.matrix
@pytest.mark.timeout(0)
@drawn(MANY)
def test_many_drawn_programs_compute_what_one_device_would(float64, program):
    compare(program)
