"""BatchNormalization with each tower's own statistics: batch_norm="average" and "tower0".

    the trace                                           in a tower
    rows -> mean, variance -> marker -> layer           mean and variance of the tower's rows
    d layer -> d rows -> marker                         d rows, from the tower's sums of gradients

A marker is an IdentityN that also has the inputs of what it marks. The moving averages read the
average of the towers' statistics, or tower 0's.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.divide.context import Context
from towers.divide.facts import EACH, ONCE, OWN, SIZE, WHOLE, Each, Op, Tensors
from towers.divide.flat import MARKER
from towers.machine.keras_internals import all_layers, moments_of, moments_replaced

_numbers = itertools.count()
Moments = Callable[..., tuple[tf.Tensor, tf.Tensor]]  # (rows, mask) -> (mean, variance)


class Marked(NamedTuple):
    """Describes a marker: how many results it has, and what computes them of its other inputs."""

    num_results: int
    compute: Callable[..., Tensors]


@contextmanager
def marking(model: keras.Model) -> Iterator[dict[str, Marked]]:
    """Inside the context, a trace marks the statistics of layers that are not synchronized.

    Yields the markers by the name of their operation.
    """
    markers: dict[str, Marked] = {}
    with ExitStack() as stack:
        for layer in all_layers(model):
            if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized:
                moments = _marked(moments_of(layer), markers)
                stack.enter_context(moments_replaced(layer, moments))
        yield markers


def _marked(original: Moments, markers: dict[str, Marked]) -> Moments:
    """Returns moments that are marked, with their gradient."""

    def forward(x: tf.Tensor, *mask: tf.Tensor) -> Tensors:
        return list(original(x, *(mask or (None,))))

    def backward(of_mean: tf.Tensor, of_variance: tf.Tensor, *inputs: tf.Tensor) -> Tensors:
        # No tape records while a tower's function is traced. `tf.gradients` looks at all that the
        # rows lead to: at the identity's few operations, and not at the rest of the model's.
        rows, *mask = inputs
        rows = tf.identity(rows)
        return tf.gradients(forward(rows, *mask), [rows], [of_mean, of_variance])

    def mark(compute: Callable[..., Tensors], inputs: Tensors) -> Tensors:
        results = compute(*inputs)
        name = f"{MARKER}{next(_numbers)}"
        markers[name] = Marked(len(results), compute)
        return tf.identity_n([*results, *inputs], name=name)[: len(results)]

    def moments(inputs: tf.Tensor, mask: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        @tf.custom_gradient
        def marked(*given: tf.Tensor) -> tuple[tuple[tf.Tensor, ...], Callable]:
            def gradient(*sums: tf.Tensor) -> list[tf.Tensor | None]:
                return [*mark(backward, [*sums, *given]), *(None for _ in given[1:])]

            return tuple(mark(forward, [*given])), gradient

        found: tuple[tf.Tensor, tf.Tensor] = (
            marked(inputs) if mask is None else marked(inputs, mask)
        )
        return found

    return moments


def each_of(op: Op, markers: Mapping[str, Marked]) -> Each | None:
    """Returns how towers compute what a marker marks, from their own rows and sums."""
    marker = markers.get(op.source.name.rpartition("/")[2]) if op.type == "IdentityN" else None
    if marker is None:
        return None
    inputs = op.inputs[marker.num_results :]
    # A value that is there once, such as a mask of constants, has no rows of the tower.
    if any(value.fact.kind not in ("rows", "part") for value in inputs):
        return None
    is_forward = all(value.fact.kind == "rows" for value in inputs)
    if is_forward:
        facts = [EACH] * marker.num_results
    else:
        facts = [inputs[-1].fact]
    rest = [value.fact for value in inputs]

    def emit(context: Context, op: Op, values: Tensors) -> Tensors:
        return [*marker.compute(*values), *values]

    return Each([(value, OWN) for value in inputs], [*facts, *rest], emit)


def elementwise(op: Op) -> Each | None:
    """Returns how towers compute with their statistics and whole values."""
    if op.is_stateful or any(value.fact not in (EACH, ONCE, SIZE) for value in op.inputs):
        return None
    needs = [(value, OWN if value.fact == EACH else WHOLE) for value in op.inputs]
    return Each(needs, [EACH] * len(op.outputs))
