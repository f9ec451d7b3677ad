"""Uses the rows of all towers: `towers.gather`, and synchronized BatchNormalization.

    tower 0   n, sum(x) --+             +--> mean, sum((x - mean)^2) --+             +--> variance
    tower 1   n, sum(x) --+-- sum --+--> mean, sum((x - mean)^2) --+-- sum --+--> variance
    ...

Output, statistics and gradient equal one device's. The backward pass has as many sums over towers.
Collective operations are as fast, but need a device for each tower and add in no fixed order.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from towers.machine.keras_internals import all_layers, moments_replaced
from towers.machine.user_lines import warn_user
from towers.step.structures import as_tensor

# The function that `gather` calls in this thread; None if it returns its argument.
GATHERER: ContextVar[Callable[[tf.Tensor], tf.Tensor] | None] = ContextVar("gather", default=None)


class NeedsOtherTowers(ValueError):
    """Signals that a tower needs other towers' rows or sums, but is computed without them."""


@tf.autograph.experimental.do_not_convert
def gather(rows: tf.Tensor) -> tf.Tensor:
    """Returns the rows of all towers, in the order of the global batch.

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
    gather_rows = GATHERER.get()
    return rows if gather_rows is None else gather_rows(as_tensor(rows))


@contextmanager
def gathered_by(gather_rows: Callable[[tf.Tensor], tf.Tensor] | None) -> Iterator[None]:
    """Sets the function that `gather` calls inside the with block, in this thread, or None."""
    token = GATHERER.set(gather_rows)
    try:
        yield
    finally:
        GATHERER.reset(token)


def refuse(rows: tf.Tensor) -> tf.Tensor:
    """Raises NeedsOtherTowers; it stands in for `gather` where towers are computed separately."""
    raise NeedsOtherTowers(
        f"towers.gather of rows of shape {rows.shape}: a TowerStep computes each tower by itself. "
        "Use towers.make_parallel(model, gpus), then compile and fit."
    )


# Maps a tower's values to their sums over all towers; gradients are summed over towers, too.
Sum: TypeAlias = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


def synchronized_layers(model: keras.Model, batch_norm: str | None) -> list[keras.layers.Layer]:
    """Returns the BatchNormalizations to synchronize: all, or those with `synchronized=True`."""
    return [
        layer
        for layer in all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and (batch_norm == "synchronized" or layer.synchronized)
    ]


def warn_of_averages(statistics: Iterable[keras.Variable]) -> None:
    """Warns that a train step averages these statistics, because `batch_norm` was not given."""
    names = list(dict.fromkeys(v.path.rpartition("/")[0] for v in statistics))
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        warn_user(
            f"BatchNormalization ({names[0]}{more}) uses the mean and variance of each tower's own "
            "examples, so results differ from one device. Pass batch_norm=\"synchronized\" for the "
            "whole batch's mean and variance, or batch_norm=\"average\" to drop this warning.",
        )


@contextmanager
def synchronized(
    layers: Sequence[keras.layers.Layer], is_real: tf.Tensor, sum_towers: Sum
) -> Iterator[None]:
    """Makes layers compute mean and variance over all towers, except empty ones (not `is_real`)."""
    with ExitStack() as stack:
        for layer in layers:
            moments = functools.partial(_moments, layer.axis, is_real, sum_towers)
            stack.enter_context(moments_replaced(layer, moments))
        yield


def _moments(
    axis: int, is_real: tf.Tensor, sum_towers: Sum, inputs: tf.Tensor, mask: Any = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (mean, variance) over all towers, [C] each, by Keras' formulas.

    With weights w of 0 or 1, W = sum(w) (with a mask, plus Keras' epsilon), and x of all towers:

        mean = sum(w * x) / W            variance = sum(w * (x - mean)^2) / W
        d mean / d x_i = w_i / W         d variance / d x_i = 2 * w_i / W * (x_i - mean - offset)
        offset = sum(w * (x - mean)) / W = epsilon * mean / W, or 0 without a mask
    """
    axes = [i for i in range(inputs.shape.rank) if i != axis % inputs.shape.rank]
    shape = [1 if i in axes else -1 for i in range(inputs.shape.rank)]
    is_real, weights, epsilon = tf.cast(is_real, inputs.dtype), None, 0.0
    if mask is None:
        channels = inputs.shape[axis]
        count = tf.fill([channels], tf.cast(tf.size(inputs) // channels, inputs.dtype) * is_real)
    else:
        weights = tf.cast(mask[..., tf.newaxis], inputs.dtype) * tf.ones_like(inputs)
        count, epsilon = tf.reduce_sum(weights, axes) * is_real, keras.config.epsilon()
    (count,) = sum_towers([count])
    count += epsilon

    def weigh(values: tf.Tensor) -> tf.Tensor:
        return values if weights is None else values * weights

    @tf.custom_gradient
    def moments(x: tf.Tensor) -> Any:
        (total,) = sum_towers([tf.reduce_sum(weigh(x), axes) * is_real])
        mean = total / count
        # Keras' second derivatives, too: without a mask, tf.nn.moments holds this mean constant.
        difference = x - tf.reshape(tf.stop_gradient(mean) if weights is None else mean, shape)
        (squares,) = sum_towers([tf.reduce_sum(weigh(tf.square(difference)), axes) * is_real])

        def backward(*gradients: tf.Tensor) -> tf.Tensor:
            sums = sum_towers([gradient * is_real for gradient in gradients])
            of_mean, of_variance = [value * is_real / count for value in sums]
            slope = 2 * of_variance
            constant = of_mean - slope * mean * (epsilon / count)
            return weigh(difference * tf.reshape(slope, shape) + tf.reshape(constant, shape))

        return (mean, squares / count), backward

    return moments(inputs)
