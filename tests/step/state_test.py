"""The comparison of two real workers is in parallel_model_workers_test.py."""

import hashlib

import keras
import numpy as np
import pytest

import towers
from towers.step.state import variable_digest


def test_a_digest_is_of_the_bits_the_dtype_and_the_shape():
    values = [[0.0, 1.0], [-0.0, 1.0], [0.0, 1.5], [[0.0], [1.0]]]
    variables = [keras.Variable(np.array(value, "float32")) for value in values]
    variables += [keras.Variable(np.array([0.0, 1.0]), dtype="float64")]
    assert len({variable_digest(variable) for variable in variables}) == len(variables)
    same = keras.Variable(np.array(values[0], "float32"))
    assert variable_digest(variables[0]) == variable_digest(same)


def test_a_models_digest_begins_the_sha256_of_its_weights():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.set_weights([np.array([[1.0], [2.0]]), np.array([3.0])])
    model.layers[0].seed_generator.next()
    expected = hashlib.sha256(np.array([1.0, 2.0, 3.0], "<f4").tobytes()).hexdigest()
    assert towers.digest(model) == expected[:8]
    with pytest.raises(ValueError, match="is not built"):
        towers.digest(keras.Sequential([keras.layers.Dense(1)]))
