"""Provides `towers.gather`, which returns the rows of all towers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import tensorflow as tf

from towers.step.tensor_rows import as_tensor

_GATHER: ContextVar[Callable[[tf.Tensor], tf.Tensor] | None] = ContextVar("gather", default=None)


class NeedsOtherTowers(ValueError):
    """Signals that a tower needs other towers' rows or sums, but is computed without them."""


@tf.autograph.experimental.do_not_convert
def gather(rows: tf.Tensor) -> tf.Tensor:
    """
    Returns the rows of all towers, in the order of the global batch.

    Use it where examples are compared with each other, as in a contrastive loss, in statistics of a
    batch or in a mean over a mask. Gradients reach the rows of every tower. Outside of towers it
    returns `rows`, so the model is still a plain Keras model.

    Args:
        rows: a tensor [n, ...] with one row for each example of the tower's shard.

    Returns:
        A tensor [N, ...].

    Raises:
        ValueError: `rows` has no batch axis, or the call is within a condition or a loop.
    """
    gather_rows = _GATHER.get()
    return rows if gather_rows is None else gather_rows(as_tensor(rows))


@contextmanager
def gathered_by(gather_rows: Callable[[tf.Tensor], tf.Tensor] | None) -> Iterator[None]:
    """Sets the function that `gather` calls inside the with block, in this thread, or None."""
    token = _GATHER.set(gather_rows)
    try:
        yield
    finally:
        _GATHER.reset(token)


def gatherer() -> Callable[[tf.Tensor], tf.Tensor] | None:
    """Returns the function that `gather` calls in this thread; None if it returns its argument."""
    return _GATHER.get()


def refuse(rows: tf.Tensor) -> tf.Tensor:
    """Raises NeedsOtherTowers; it stands in for `gather` where towers are computed separately."""
    raise NeedsOtherTowers(
        f"towers.gather of rows of shape {rows.shape}: a TowerStep computes each tower by itself. "
        "Use towers.make_parallel(model, gpus), then compile and fit."
    )
