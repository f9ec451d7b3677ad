"""TowerStep against Keras on one device, and what must not change."""

import gc
import weakref
import hashlib

import keras
import numpy as np
import pytest

import towers
from tests.step.small_step import batch, make_step, plain
from towers.machine.devices import CPU
from towers.step.digests import variable_digest

L = keras.layers


def test_train_batch_gives_running_means_and_a_call_this_batchs_values(float64):
    step = make_step(layers=plain, optimizer=keras.optimizers.SGD(0.0))
    first, second = step(*batch(8)), step(*batch(16))
    step.reset_metrics()
    step.train_batch(*batch(8))
    both = step.train_batch(*batch(16))
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(both[name], (8 * first[name] + 16 * second[name]) / 24)


def test_an_optimizer_that_is_built_stays_as_it_is():
    """A model's file brings one; built twice, Keras' LossScaleOptimizer has its counters twice."""
    layers = plain()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(keras.Sequential(layers).trainable_variables)
    before = list(map(id, optimizer.variables))
    make_step(layers=lambda: layers, optimizer=optimizer)
    assert list(map(id, optimizer.variables)) == before


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_towers": 0}, "num_towers .0. must be at least 1"),
        ({"nonfinite": "raise"}, "'raise'.* must be one of apply, stop, skip"),
        ({"layers": lambda: [L.Dense(1)]}, "is not built"),
    ],
)
def test_a_step_that_cannot_be_exact_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        make_step(**options)


def test_a_batch_without_examples_is_an_error():
    with pytest.raises(ValueError, match="no examples"):
        make_step(layers=plain)(*batch(0))


def test_a_step_that_nobody_needs_any_more_leaves_no_graph_behind():
    """Nor, with it, parameters and slots: Keras' optimizers would keep them for ever."""
    step = make_step(layers=plain, optimizer="adam", policy=CPU)
    step(*batch(8))
    graph = weakref.ref(step.traces[-1].graph)
    del step
    gc.collect()
    assert graph() is None


def test_a_digest_is_of_the_bits_the_dtype_and_the_shape():
    values = [[0.0, 1.0], [-0.0, 1.0], [0.0, 1.5], [[0.0], [1.0]]]
    variables = [keras.Variable(np.array(value, "float32")) for value in values]
    variables += [keras.Variable(np.array([0.0, 1.0]), dtype="float64")]
    assert len({variable_digest(variable) for variable in variables}) == len(variables)
    same = keras.Variable(np.array(values[0], "float32"))
    assert variable_digest(variables[0]) == variable_digest(same)


def test_a_models_digest_begins_the_sha256_of_its_weights():
    model = keras.Sequential([keras.Input((2,)), L.Dropout(0.5), L.Dense(1)])
    model.set_weights([np.array([[1.0], [2.0]]), np.array([3.0])])
    model.layers[0].seed_generator.next()
    expected = hashlib.sha256(np.array([1.0, 2.0, 3.0], "<f4").tobytes()).hexdigest()
    assert towers.digest(model) == expected[:8]
    never_called = keras.Model()  # like a GAN, which calls its parts only
    never_called.part = model
    assert not never_called.built and towers.digest(never_called) == expected[:8]
    with pytest.raises(ValueError, match="is not built"):
        towers.digest(keras.Sequential([L.Dense(1)]))
