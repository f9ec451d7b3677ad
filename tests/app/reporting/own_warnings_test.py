"""What towers warn of reaches the terminal; what libraries do stays where it is."""

import warnings

import keras
import numpy as np

import towers
from towers.app.reporting import own_warnings


class Mixes(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


def test_a_layer_that_computes_across_rows_is_told_and_a_librarys_warning_is_not():
    model = keras.Sequential([keras.Input((3,)), Mixes(name="mixes"), keras.layers.Dense(1)])
    step = towers.TowerStep(model, "sgd", "mse", devices=["/cpu:0"], num_towers=2)
    said = []
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with own_warnings.told(said.append):
            step(np.ones((4, 3), "float32"), np.ones((4, 1), "float32"))
            warnings.warn("of a library", stacklevel=1)
    assert len(said) == 1 and "Each tower has only its own rows of the batch" in said[0]
    assert [str(each.message) for each in others] == ["of a library"]
