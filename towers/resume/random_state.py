"""Reads and sets the state of the random numbers that Python and NumPy share in a process.

Keras shuffles a PyDataset by Python's `random`; data of users often draw from `np.random`.
"""

import random
from array import array
from collections.abc import Mapping

import numpy as np

from towers.resume.stateful import Json, decoded, encoded


def random_state() -> dict[str, Json]:
    """Returns the state of `random` and of `np.random` as JSON values."""
    version, words, gauss = random.getstate()
    return {
        # An array, because a tuple of 625 numbers takes 20 times as long to encode.
        "python": encoded((version, array("I", words).tobytes(), gauss)),
        "numpy": encoded(np.random.get_state(legacy=False)),
    }


def set_random_state(state: Mapping[str, Json]) -> None:
    """Sets the results of `random_state` that are given: one of them, both or none."""
    if "python" in state:
        version, words, gauss = decoded(state["python"])
        random.setstate((version, tuple(array("I", words)), gauss))
    if "numpy" in state:
        np.random.set_state(decoded(state["numpy"]))
