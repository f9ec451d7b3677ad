"""A program of one device updates what lies on others, and leaves it there."""

import keras
import pytest
import tensorflow as tf

from towers.step.copies import Copies


def optimizer_of(variables, device):
    with tf.device(device):
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    optimizer.build(variables)
    return optimizer


def variable_on(device):
    with tf.device(device):
        return keras.Variable([1.0, 2.0])


def devices(variables):
    return [variable.value.device[-5:] for variable in variables]


def test_within_variables_are_at_home_and_afterwards_where_they_were():
    parameter = variable_on("/cpu:0")
    optimizer, copies = optimizer_of([parameter], "/cpu:3"), Copies("/cpu:0")
    known = optimizer.iterations.value
    for rate in (0.25, 0.125):
        optimizer.learning_rate = rate
        with copies.used(optimizer, [parameter]):
            assert devices(optimizer.variables) == ["CPU:0"] * 3
            assert float(optimizer.learning_rate) == rate
            optimizer.apply([tf.constant([1.0, 1.0])], [parameter])
        assert devices(optimizer.variables) == ["CPU:3", "CPU:3", "CPU:0"]
    assert optimizer.iterations.value is known and int(known) == 2
    # velocities -0.25 and 0.9 * -0.25 - 0.125
    assert parameter.numpy().tolist() == pytest.approx([1 - 0.25 - 0.35, 2 - 0.25 - 0.35])


def test_an_exception_within_leaves_all_as_it_was():
    parameter = variable_on("/cpu:0")
    optimizer = optimizer_of([parameter], "/cpu:3")
    with pytest.raises(InterruptedError):
        with Copies("/cpu:0").used(optimizer, [parameter]):
            optimizer.iterations.assign(5)
            raise InterruptedError
    assert devices(optimizer.variables) == ["CPU:3", "CPU:3", "CPU:0"]
    assert int(optimizer.iterations) == 0
