"""The bytes by which tests compare values bit by bit."""

import numpy as np


def bits(value):
    """Returns the bytes of an array, tensor or variable, which must be finite.

    A test whose values are all NaN would find equal bytes whatever towers compute.
    """
    array = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
    if array.dtype.kind not in "OSU":
        assert np.isfinite(array).all(), "values that are not finite"
    return array.tobytes()
