"""NaN equals nothing in these tests: if all values were NaN, no comparison could fail."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.bits import bits
from tests.conformance.steps import fit_alike, model_with
from tests.parallel.pairs import assert_close, assert_same_logs


def diverges(model, data):
    kernel = model.trainable_weights[0]
    kernel.assign(kernel * np.nan)
    return {"loss": tf.reduce_sum(kernel)}


@pytest.mark.parametrize(
    "compare",
    [
        np.testing.assert_allclose,
        np.testing.assert_array_equal,
        assert_close,
        lambda a, b: assert_same_logs({"loss": a}, {"loss": b}),
        lambda a, b: bits(keras.Variable(a)) == bits(b),
        lambda a, b: fit_alike(lambda: model_with(diverges)),
    ],
)
def test_no_comparison_finds_nan_equal(compare):
    with pytest.raises(AssertionError, match="not finite"):
        compare([1.0, np.nan], [1.0, np.nan])
    with pytest.raises(AssertionError, match="not finite"):
        compare(np.array([np.inf]), np.array([np.inf]))
