"""Variables in a tower's forward pass: reads, assignments, and whose gradient they have."""

import keras
import pytest
import tensorflow as tf

from towers.step.forward_scope import ForwardScope
from towers.step.gathering import NeedsOtherTowers


def test_an_assigned_parameter_has_its_new_value_and_the_gradient_of_the_old():
    variable = keras.Variable(3.0)
    with tf.GradientTape() as tape:
        value = tf.constant(3.0)
        tape.watch(value)
        with ForwardScope([(variable, value)], []) as scope:
            variable.assign(variable * 10.0)
            result = variable * 2.0
    assert float(result) == 60.0
    assert float(tape.gradient(result, value)) == 2.0
    assert float(scope.get_current_value(variable)) == 30.0
    assert float(variable) == 3.0


def test_what_is_no_weight_of_the_model_is_named():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="mine")
    own = keras.Variable(0.0, name="own")
    with ForwardScope([], []) as scope:
        float(own.value)
    scope.check_closed(model)  # it was only read
    with ForwardScope([], []) as scope:
        own.assign(1.0)
    with pytest.raises(NeedsOtherTowers, match="'mine' assigns .*own.*make_parallel"):
        scope.check_closed(model)
