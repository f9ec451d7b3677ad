"""Takes back what a step assigns to variables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf


@contextmanager
def unchanged(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Gives variables back the values that they have at the beginning of the context."""
    before = [variable.read_value() for variable in variables]
    try:
        yield
    finally:
        restore(variables, before)


def restore(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    """Assigns values to variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value, read_value=False)
