"""`towers.gather`: the rows of all towers, by whoever is tracing them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import tensorflow as tf

from towers.step.tensor_rows import as_tensor

_GATHER: ContextVar[Callable[[tf.Tensor], tf.Tensor] | None] = ContextVar("gather", default=None)


class NeedsOtherTowers(ValueError):
    """A tower that is computed in one piece needs other towers' rows, or sums over all towers."""


@tf.autograph.experimental.do_not_convert
def gather(rows: tf.Tensor) -> tf.Tensor:
    """The rows of all towers, in the order of the global batch.

    For what compares examples with each other: a contrastive loss, a batch's own statistics, a mean
    over a mask. Its gradient reaches the rows of every tower. Outside of towers: the rows
    themselves, so that a model means the same with and without them.

    Args:
        rows: a tensor [n, ...] with one row for each example of the tower's shard.

    Returns:
        [N, ...].

    Raises:
        ValueError: `rows` has no batch axis, or is gathered in a condition or a loop.
    """
    gather_rows = _GATHER.get()
    return rows if gather_rows is None else gather_rows(as_tensor(rows))


@contextmanager
def gathered_by(gather_rows: Callable[[tf.Tensor], tf.Tensor] | None) -> Iterator[None]:
    """Within, in this thread, `gather` calls `gather_rows`; None: it returns its argument."""
    token = _GATHER.set(gather_rows)
    try:
        yield
    finally:
        _GATHER.reset(token)


def gatherer() -> Callable[[tf.Tensor], tf.Tensor] | None:
    """Returns what `gather` calls in this thread; None: it returns its argument."""
    return _GATHER.get()


def refuse(rows: tf.Tensor) -> tf.Tensor:
    """Raises NeedsOtherTowers."""
    raise NeedsOtherTowers(
        f"towers.gather of rows of shape {rows.shape}: a TowerStep computes each tower by itself. "
        "Use towers.make_parallel(model, gpus), then compile and fit."
    )
