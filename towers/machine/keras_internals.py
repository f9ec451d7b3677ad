"""Keras' private names that towers cannot do without. No other module knows them.

Each part says which need it serves and why no public way does; all hold in Keras 3.10, which
TensorFlow 2.20 asks for, to 3.15. The tests of this module name the part that a new version breaks.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine.replaced import replaced, replaced_by

# Layers.


def all_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """A model or layer and all layers inside of it, each once, however deep.

    `model.layers` has those of the first level alone, and a layer that is no model (Bidirectional,
    RNN, MultiHeadAttention) has no such attribute.
    """
    return layer._flatten_layers()


class Call(NamedTuple):
    """One call of a layer or operation.

    operation: the layer. outputs: Keras' symbolic tensors. arguments: positional ones, such as
    (tensor, 255.0) of `tensor / 255.0`.
    """

    operation: Any
    outputs: list[Any]
    arguments: Sequence[Any]


def calls_in_order(model: keras.Model) -> list[Call] | None:
    """The calls of a Sequential or functional model in the order in which it makes them.

    Those of models inside of it are in their place. None for a model whose `call` is its class's
    own. A graph's order is public nowhere.
    """
    calls: list[Call] = []

    def graph_of(operation: Any) -> Any:
        if type(operation).call not in (keras.Sequential.call, _FUNCTIONAL_CALL):
            return None
        graph = getattr(operation, "_functional", operation)  # None: a Sequential is not built
        return graph if hasattr(graph, "_nodes_by_depth") else None

    def add(graph: Any) -> None:
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
    operations: Sequence[Any], scope_of: Callable[[Any, int], AbstractContextManager]
) -> Iterator[None]:
    """Within, each call of these operations is made in a context.

    Keras has no hook around `call`, in which all that a layer computes is.

    Args:
        operations: layers or operations.
        scope_of: (operation, the number of its calls before) -> the context.
    """
    def scoped(operation: Any, call: Callable) -> Callable:
        counter = itertools.count()

        @functools.wraps(call)
        def call_in_scope(*args: Any, **kwargs: Any) -> Any:
            with scope_of(operation, next(counter)):
                return call(*args, **kwargs)

        return call_in_scope

    with ExitStack() as stack:
        for operation in operations:
            stack.enter_context(replaced(operation, "call", functools.partial(scoped, operation)))
        yield


def give_seed_generator(layer: keras.layers.Layer, seed: int | None) -> None:
    """Gives a built layer the `seed_generator` that it lacks; its state is tracked in the layer.

    A built layer takes no new state, and `build` makes none that its `__init__` would have made.
    """
    layer._tracker.unlock()
    layer.seed_generator = keras.random.SeedGenerator(seed)
    layer._tracker.lock()


@contextmanager
def noise_left_out() -> Iterator[None]:
    """Within, Keras draws no random numbers: dropout keeps all, a distribution has one value.

    No value is 0, so that each parameter keeps its gradient. `keras.random` and all layers call
    these functions; there is no public way to turn off the noise of every layer.
    """
    from keras.src.backend.tensorflow import random

    def filled(shape: Any, value: Any, dtype: Any = None, **_: Any) -> tf.Tensor:
        return tf.broadcast_to(tf.cast(value, dtype or keras.config.floatx()), shape)

    def uniform(shape: Any, minval: Any = 0.0, maxval: Any = 1.0, **rest: Any) -> tf.Tensor:
        return filled(shape, minval + 0.9 * (maxval - minval), **rest)  # dropout keeps 0.9

    def normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, **rest: Any) -> tf.Tensor:
        return filled(shape, mean + stddev, **rest)

    functions: dict[str, Callable[..., Any]] = {
        "normal": normal,
        "truncated_normal": normal,
        "uniform": uniform,
        "categorical": lambda logits, num_samples, dtype="int64", **_: filled(
            (tf.shape(logits)[0], num_samples), 0, dtype
        ),
        "randint": lambda shape, minval, maxval, **rest: filled(shape, minval, **rest),
        "gamma": lambda shape, alpha, **rest: filled(shape, alpha, **rest),
        "beta": lambda shape, alpha, beta, **rest: filled(shape, alpha / (alpha + beta), **rest),
        "binomial": lambda shape, counts, **rest: filled(shape, counts, **rest),
        "dropout": lambda inputs, rate, *_, **__: inputs,
        "shuffle": lambda x, *_, **__: x,
    }
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(replaced_by(random, name, function))
        yield


def moments_replaced(
    layer: keras.layers.BatchNormalization, moments: Callable[..., tuple[tf.Tensor, tf.Tensor]]
) -> AbstractContextManager[None]:
    """Within, a BatchNormalization takes its batch's mean and variance from `moments`.

    Keras' `call` computes them, updates the statistics and normalizes in one: there is no way in
    but to repeat all of it.

    Args:
        layer: the layer.
        moments: (inputs [n, ...], mask) -> mean and variance, [channels] each.
    """
    return replaced_by(layer, "_moments", moments)


def surroundings() -> Callable[[], AbstractContextManager[None]]:
    """A maker of contexts in which layers are called as they would be here.

    They take `training`, and the dtype of what they compute, from the layers around them, of which
    the backward pass knows nothing any more; there is no public way to either.
    """
    from keras.src.backend.common import global_state

    names = ("current_call_ctx", "autocast_scope")
    here = [global_state.get_global_attribute(name) for name in names]

    @contextmanager
    def around() -> Iterator[None]:
        before = [global_state.get_global_attribute(name) for name in names]
        try:
            for name, value in zip(names, here, strict=True):
                global_state.set_global_attribute(name, value)
            yield
        finally:
            for name, value in zip(names, before, strict=True):
                global_state.set_global_attribute(name, value)

    return around


# The class of the layers that change images at random, and their labels; it is exported under no
# name of its own.
ImageAugmentation = keras.layers.MixUp.__base__


# Variables.


def stored_value(variable: keras.Variable) -> tf.Variable | None:
    """TensorFlow's variable behind Keras'; None where it is still to be made.

    `variable.value` hands out the same, but in a StatelessScope what the scope says, or a
    placeholder: a scope that reads it itself has no public way.
    """
    return variable._value


@contextmanager
def stored_in(
    variables: Sequence[keras.Variable], others: Sequence[tf.Variable]
) -> Iterator[None]:
    """Within, Keras' variables keep their values in other variables of TensorFlow.

    A StatelessScope would replace values by tensors, which an optimizer cannot assign to on
    TensorFlow.
    """
    with ExitStack() as stack:
        for variable, other in zip(variables, others, strict=True):
            stack.enter_context(replaced_by(variable, "_value", other))
        yield


def optimized_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that a built optimizer was built for, in order.

    `optimizer.variables` has those of its own alone.
    """
    return optimizer._trainable_variables
