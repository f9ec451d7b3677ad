"""The comparison of two real workers is in parallel_model_workers_test.py."""

import keras
import numpy as np

from towers.step.state import digest


def test_a_digest_is_of_the_bits_the_dtype_and_the_shape():
    values = [[0.0, 1.0], [-0.0, 1.0], [0.0, 1.5], [[0.0], [1.0]]]
    variables = [keras.Variable(np.array(value, "float32")) for value in values]
    variables += [keras.Variable(np.array([0.0, 1.0]), dtype="float64")]
    assert len({digest(variable) for variable in variables}) == len(variables)
    assert digest(variables[0]) == digest(keras.Variable(np.array(values[0], "float32")))
