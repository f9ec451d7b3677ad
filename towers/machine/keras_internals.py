"""Holds the private names of Keras that towers needs, and says why no public name works.

All exist in Keras 3.10, which TensorFlow 2.20 requires, to 3.15. If a new version breaks one, this
module's tests name it.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import random

from towers.machine.replaced import replaced, replaced_by


def all_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns a model or layer and all layers inside it, at any depth, each once."""
    return layer._flatten_layers()


def auto_jit_compile(model: keras.Model) -> bool:
    """Returns the value that Keras stores for `compile(jit_compile="auto")`; "auto" is lost."""
    return bool(model._resolve_auto_jit_compile())


class Call(NamedTuple):
    """Describes one call; its positional arguments are (tensor, 255.0) for `tensor / 255.0`."""

    operation: keras.Operation
    outputs: list[keras.KerasTensor]
    arguments: Sequence[object]


def calls_in_order(model: keras.Model) -> list[Call] | None:
    """Returns a Sequential or functional model's calls in order; None if `call` is custom."""
    calls: list[Call] = []

    def graph_of(operation: keras.Operation) -> keras.Function | None:
        if type(operation).call not in (keras.Sequential.call, _FUNCTIONAL_CALL):
            return None
        graph = getattr(operation, "_functional", operation)  # None: a Sequential is not built
        if hasattr(graph, "_nodes_by_depth"):
            return graph
        return None

    def add(graph: keras.Function) -> None:
        # Depths count from the outputs, so the largest one comes first. The calls inside an inner
        # model stand for the call of that model, because stages may begin between them.
        for depth in sorted(graph._nodes_by_depth, reverse=True):
            for node in graph._nodes_by_depth[depth]:
                if not node.operation or node.is_input:
                    continue
                if inner := graph_of(node.operation):
                    add(inner)
                else:
                    calls.append(Call(node.operation, node.output_tensors, node.arguments.args))

    if (graph := graph_of(model)) is None:
        return None
    add(graph)
    return calls


_FUNCTIONAL_CALL = type(keras.Model(*[keras.Input((1,))] * 2)).call


@contextmanager
def calls_wrapped(
    operations: Sequence[keras.Operation],
    scope_of: Callable[[keras.Operation, int], AbstractContextManager],
) -> Iterator[None]:
    """Inside the context, call n of each operation runs in the context `scope_of(operation, n)`."""

    def scoped(operation: keras.Operation, call: Callable) -> Callable:
        counter = itertools.count()

        @functools.wraps(call)
        def call_in_scope(*args: object, **kwargs: object) -> object:
            with scope_of(operation, next(counter)):
                return call(*args, **kwargs)

        return call_in_scope

    with ExitStack() as stack:
        for operation in operations:
            stack.enter_context(replaced(operation, "call", functools.partial(scoped, operation)))
        yield


@contextmanager
def noise_left_out() -> Iterator[None]:
    """Inside the context, Keras draws constants, not random numbers, and dropout keeps all."""

    # Constants are not 0 by default, so that each parameter keeps its gradient.
    def filled(
        shape: Sequence[int], value: tf.Tensor, dtype: str | None = None, **_: object
    ) -> tf.Tensor:
        return tf.broadcast_to(tf.cast(value, dtype or keras.config.floatx()), shape)

    def uniform(
        shape: Sequence[int], minval: float = 0.0, maxval: float = 1.0, **rest: Any
    ) -> tf.Tensor:
        return filled(shape, minval + 0.9 * (maxval - minval), **rest)  # dropout keeps 0.9

    def normal(
        shape: Sequence[int], mean: float = 0.0, stddev: float = 1.0, **rest: Any
    ) -> tf.Tensor:
        return filled(shape, mean + stddev, **rest)

    functions: dict[str, Callable[..., tf.Tensor]] = {
        "normal": normal,
        "truncated_normal": normal,
        "uniform": uniform,
        "categorical": lambda z, n, dtype="int64", **_: filled((tf.shape(z)[0], n), 0, dtype),
        "randint": lambda shape, minval, maxval, **rest: filled(shape, minval, **rest),
        "gamma": lambda shape, alpha, **rest: filled(shape, alpha, **rest),
        "beta": lambda shape, alpha, beta, **rest: filled(shape, alpha / (alpha + beta), **rest),
        "binomial": lambda shape, counts, **rest: filled(shape, counts, **rest),
        "dropout": lambda inputs, *_, **__: inputs,
        "shuffle": lambda x, *_, **__: x,
    }
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(replaced_by(random, name, function))
        yield


def moments_of(
    layer: keras.layers.BatchNormalization,
) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """Returns the method (inputs, mask) -> (mean, variance) of a BatchNormalization."""
    return layer._moments  # type: ignore[no-any-return]


def moments_replaced(
    layer: keras.layers.BatchNormalization, moments: Callable[..., tuple[tf.Tensor, tf.Tensor]]
) -> AbstractContextManager[None]:
    """Inside the context, a BatchNormalization's mean and variance are `moments(inputs, mask)`."""
    return replaced_by(layer, "_moments", moments)


def stored_value(variable: keras.Variable) -> tf.Variable | None:
    """Returns the tf.Variable behind a Keras variable, also in a StatelessScope, if it is made."""
    return variable._value


def store_in(variable: keras.Variable, other: tf.Variable) -> None:
    """Makes a Keras variable keep its value in `other`, which it reads and assigns."""
    variable._value = other
