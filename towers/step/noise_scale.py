"""Estimates the gradient noise scale: the batch size beyond which most examples are wasted.

McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162 (2018), A.1:

    B_simple = tr(S) / |G|^2      G: the gradient over all data; S: the covariance of one example's

The gradient g_t of a shard of n_t examples has E|g_t|^2 = |G|^2 + tr(S) / n_t; so has the batch's
gradient g, with N examples. Towers weigh g_t by n_t / N, and add. With T shards that have examples,

    a = sum(|n_t / N * g_t|^2 / (n_t / N))      E[a] = |G|^2 + tr(S) * T / N
    b = |g|^2                                   E[b] = |G|^2 + tr(S) / N

which gives unbiased estimates of both. Each is averaged over some of the steps before they are
divided: to measure each step would take up to a tenth of its time.
"""

import functools

import keras
import tensorflow as tf

from towers.step.averaging import Values

EVERY = 20  # the number of steps from one measurement to the next
FIRST = 10  # the number of steps that are measured at first, for short epochs


class NoiseMetric(keras.metrics.Metric):
    """Averages tr(S) and |G|^2 over the first 10 steps and then over every 20th step.

    `result` is B_simple, in examples. It is NaN if no such step had two shards with examples, and
    infinite if the average of |G|^2 is not positive: there were too few steps to tell the gradient
    from its noise.
    """

    def __init__(self) -> None:
        super().__init__(name="noise_scale", dtype="float64")
        self.trace = self.add_variable((), "zeros", name="trace")
        self.square = self.add_variable((), "zeros", name="square")
        self.count = self.add_variable((), "zeros", name="count")
        self._remaining = 0  # the next step that may be due is at least so many steps ahead

    def is_due(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Returns whether to measure the next step; call it once before each step."""
        self._remaining -= 1
        if self._remaining > 0:  # reading a variable after a step takes 0.2 ms
            return False
        # Both numbers are in a checkpoint, so that a resumed run measures the same steps.
        num_updates = int(optimizer.iterations)
        is_due = num_updates % EVERY == 0 or float(self.count) < FIRST
        self._remaining = 0 if is_due else EVERY - num_updates % EVERY  # more, if some are skipped
        return is_due

    def reset_state(self) -> None:
        super().reset_state()
        self._remaining = 0

    def update_state(self, shards: tf.Tensor, sizes: tf.Tensor, batch: tf.Tensor) -> None:
        """Adds the estimates of one step, unless a gradient is not finite.

        shards: float [T], squared norms of the gradients that towers add, n_t / N * g_t.
        sizes: [T], the numbers of examples n_t; shards without examples do not count.
        batch: scalar float, the squared norm of the sum of these gradients.
        """
        n = tf.cast(sizes, tf.float64)
        total, count = tf.reduce_sum(n), tf.math.count_nonzero(n, dtype=tf.float64)
        a = tf.reduce_sum(tf.math.divide_no_nan(tf.cast(shards, tf.float64) * total, n))
        b = tf.cast(batch, tf.float64)
        is_known = tf.math.is_finite(a + b) & (count > 1)
        trace, square = (a - b) * total / (count - 1), (count * b - a) / (count - 1)
        self.trace.assign_add(tf.where(is_known, trace, 0))
        self.square.assign_add(tf.where(is_known, square, 0))
        self.count.assign_add(tf.cast(is_known, tf.float64))

    def result(self) -> tf.Tensor:
        scale = tf.where(self.square > 0, self.trace / self.square, float("inf"))
        return tf.where(self.count > 0, scale, float("nan"))


def squared_norm(gradients: Values) -> tf.Tensor:
    """Returns the squared norm of gradients as one vector, scalar float32.

    Each square is computed on the device of the gradient. Slices of one row are added first. None
    counts as 0.
    """
    squares = [tf.zeros([])]
    for gradient in gradients:
        if gradient is not None:
            with tf.device(gradient.device):
                if isinstance(gradient, tf.IndexedSlices):
                    found, rows = tf.unique(gradient.indices)
                    gradient = tf.math.unsorted_segment_sum(gradient.values, rows, tf.size(found))
                squares.append(2 * tf.nn.l2_loss(tf.cast(gradient, tf.float32)))
    return functools.reduce(tf.add, squares)
