"""Names the tower that failed: behind a CancelledError, or with NaN or infinity in a gradient.

/gpu:0  tower 0: a label is out of range --> cancels the step --> InvalidArgumentError
/gpu:1  tower 1: cancelled --> CancelledError       TensorFlow raises the error it sees first

tower 0 ... tower T-1  ->  [T, 1 + V] bool: the tower's loss, and each gradient, is finite
                           if all are true: update          otherwise: change nothing
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf

from towers.machine.devices import HOST
from towers.step.averaging import Values
from towers.step.structures import Structure, batch_specs, components, packed

_NODE = re.compile(r"\{\{node (.*?)\}\}")
_AROUND = re.compile(r"Graph execution error|Detected at node|<stack traces|\s+File |\s+\[\[")


@contextmanager
def first_error(undivided: Callable[[], object]) -> Iterator[None]:
    """Replaces a CancelledError inside the with block by the error of `undivided`, if any."""
    try:
        yield
    except tf.errors.CancelledError as cancelled:
        try:
            undivided()
        except tf.errors.OpError as found:
            raise found from None
        except Exception as reason:  # a tower that cannot run outside of the graph
            raise cancelled from reason
        raise


@contextmanager
def values_explained(where: str) -> Iterator[None]:
    """Turns the with block's InvalidArgumentError into a one-line ValueError; where: "step 3"."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        # An operation's message and name, without TensorFlow's stack.
        lines = [line for line in error.message.splitlines() if not _AROUND.match(line)]
        cause = " ".join(" ".join(lines).split()).rstrip(".")
        if node := _NODE.search(error.message):
            cause += f" (in {node[1]})"
        advice = "Check the inputs, labels and weights of this batch."
        raise ValueError(f"{where}: {cause}. {advice}") from error


class NewestBatch:
    """Keeps the newest batch of a graph that reads its batches from an iterator itself.

    given: the newest batch, if Python reads it and gives it to the graph.
    """

    def __init__(self) -> None:
        self.given: Structure = None
        self._specs: Structure = None
        self._kept: list[tf.Variable] = []

    def prepare(self, *specs: Structure) -> None:
        """Creates variables for batches of these specs, before a graph is traced for them."""
        if self._specs == batch_specs(specs):
            return  # a graph that was traced before assigns the variables
        self._specs = batch_specs(specs)
        with tf.device(HOST):
            self._kept = [
                tf.Variable(tf.zeros([], spec.dtype), trainable=False, shape=tf.TensorShape(None))
                for spec in components(self._specs)
            ]

    def keep(self, *batch: Structure) -> list[tf.Operation]:
        """Keeps a batch of the traced graph, if its specs were prepared; returns its operations."""
        if batch_specs(batch) != self._specs:
            return []
        with tf.device(HOST):
            values = zip(self._kept, components(batch), strict=True)
            return [variable.assign(value).op for variable, value in values]

    def read(self) -> Structure:
        """Returns (the batch,), which `keep` stored or was given; None before `prepare`."""
        if self.given is not None:
            return (self.given,)
        if self._specs is None:
            return None
        return packed(self._specs, iter([v.read_value() for v in self._kept]))


class NonFiniteError(ValueError):
    """Signals that a tower's loss or gradient is NaN or infinite, and names the tower."""


def checked(nonfinite: str, optimizer: keras.optimizers.Optimizer) -> tuple[str, ...]:
    """Returns which results must be finite; a LossScaleOptimizer checks gradients itself."""
    if nonfinite == "apply":
        return ()
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if is_scaled:
        return ("loss",)
    return ("loss", "gradients")


def are_finite(loss: tf.Tensor, gradients: Values) -> tf.Tensor:
    """Returns [1 + V] bool: whether a scalar loss, and each of V gradients, is finite.

    The test is one pass: is the sum of a gradient's squares finite? Values of about 1e19 overflow
    it in float32, but also overflow Adam's second moment and the norm for clipping.
    """

    def widened(values: tf.Tensor) -> tf.Tensor:
        if values.dtype.size >= 4:
            return values
        return tf.cast(values, tf.float32)

    loss = widened(loss)
    found = [loss]
    for gradient in gradients:
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        half = 0.0 if values is None else tf.nn.l2_loss(widened(values))  # half of the sum
        found.append(tf.cast(half, loss.dtype))
    return tf.math.is_finite(tf.stack(found))


def nonfinite_error(
    finite: np.ndarray, places: Sequence[str], variables: Sequence[keras.Variable]
) -> NonFiniteError:
    """Returns an error that names the first False of `finite`, the towers' [T, 1 + V] bools."""
    tower, index = np.argwhere(~finite)[0]
    what = f"the gradient of {variables[index - 1].path} in" if index else "the loss of"
    return NonFiniteError(f"{what} tower {tower} on {places[tower]} is NaN or infinite.")
