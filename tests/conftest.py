"""Every test runs on 8 logical CPU devices; they must exist before TensorFlow starts."""

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from towers import devices  # noqa: E402  (TensorFlow reads the variable above at import)

devices.set_cpu_threads(num_towers=2)
devices.logical_cpus(8)


@pytest.fixture
def float64():
    """Models, losses and data in float64, where exactness is the point."""
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])
