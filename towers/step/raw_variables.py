"""Gives a tf.Variable that Keras does not list the attributes of a Keras variable."""

import numpy as np
import tensorflow as tf


class RawVariable:
    """Gives a tf.Variable, its `value`, the attributes of a Keras variable that towers use."""

    def __init__(self, variable: tf.Variable) -> None:
        self.value = variable
        self.path = self.name = variable.name.split(":")[0]
        self.shape, self.dtype = variable.shape, variable.dtype.name
        self.trainable = variable.trainable
        self.aggregation = variable.aggregation.name.lower()

    def assign(self, value: tf.Tensor) -> None:
        """Assigns a value to the variable."""
        self.value.assign(value)

    def numpy(self) -> np.ndarray:
        """Returns the value as an array."""
        return self.value.numpy()
