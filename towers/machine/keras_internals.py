"""Keras' private names that towers cannot do without. No other module knows them.

Each part says which need it serves and why no public way does. "Since" is the oldest version of
Keras that it was found in, among the sources of 3.0.5, 3.4.1, 3.10 and 3.15; TensorFlow 2.20 asks
for 3.10 or newer. The tests of this module name the part that a new version breaks.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine.replaced import replaced

# Layers.


def all_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """A model or layer and all layers inside of it, each once, however deep.

    `model.layers` has those of the first level alone, and a layer that is no model (Bidirectional,
    RNN, MultiHeadAttention) has no such attribute. Since 3.0.5.
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
    own. A graph's order is public nowhere. Since 3.0.5.
    """
    calls: list[Call] = []

    def has_graph(operation: Any) -> bool:
        if type(operation).call is keras.Sequential.call:
            return getattr(operation, "_functional", None) is not None
        return type(operation).call is _FUNCTIONAL_CALL and hasattr(operation, "_nodes_by_depth")

    def add(graph: Any) -> None:
        graph = getattr(graph, "_functional", None) or graph
        for depth in sorted(graph._nodes_by_depth, reverse=True):
            for node in graph._nodes_by_depth[depth]:
                if node.operation and not node.is_input:
                    if has_graph(node.operation):
                        add(node.operation)
                        continue
                    calls.append(Call(node.operation, node.output_tensors, node.arguments.args))

    if not has_graph(model):
        return None
    add(model)
    return calls


_FUNCTIONAL_CALL = type(keras.Model(*[keras.Input((1,))] * 2)).call


@contextmanager
def calls_wrapped(
    operations: Sequence[Any], scope_of: Callable[[Any, int], AbstractContextManager]
) -> Iterator[None]:
    """Within, each call of these operations is made in a context.

    Keras has no hook around `call`, in which all that a layer computes is. Since 3.0.5.

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
    Since 3.4.1.
    """
    layer._tracker.unlock()
    layer.seed_generator = keras.random.SeedGenerator(seed)
    layer._tracker.lock()


@contextmanager
def noise_left_out() -> Iterator[None]:
    """Within, Keras draws no random numbers: dropout keeps all, a distribution has one value.

    No value is 0, so that each parameter keeps its gradient. `keras.random` and all layers call
    these functions; there is no public way to turn off the noise of every layer. Since 3.0.5.
    """
    from keras.src.backend.tensorflow import random

    def filled(shape: Any, value: Any, dtype: Any = None, **_: Any) -> tf.Tensor:
        return tf.broadcast_to(tf.cast(value, dtype or keras.config.floatx()), shape)

    def normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, **rest: Any) -> tf.Tensor:
        return filled(shape, mean + stddev, **rest)

    def uniform(shape: Any, minval: Any = 0.0, maxval: Any = 1.0, **rest: Any) -> tf.Tensor:
        return filled(shape, minval + 0.9 * (maxval - minval), **rest)  # dropout keeps 0.9

    def categorical(logits: Any, num_samples: int, dtype: str = "int64", **_: Any) -> tf.Tensor:
        return filled((tf.shape(logits)[0], num_samples), 0, dtype)

    functions: dict[str, Callable[..., Any]] = {
        "normal": normal,
        "truncated_normal": normal,
        "uniform": uniform,
        "categorical": categorical,
        "randint": lambda shape, minval, maxval, **rest: filled(shape, minval, **rest),
        "gamma": lambda shape, alpha, **rest: filled(shape, alpha, **rest),
        "beta": lambda shape, alpha, beta, **rest: filled(shape, alpha / (alpha + beta), **rest),
        "binomial": lambda shape, counts, **rest: filled(shape, counts, **rest),
        "dropout": lambda inputs, rate, *_, **__: inputs,
        "shuffle": lambda x, *_, **__: x,
    }

    def other(name: str) -> Callable:
        return lambda original: functions[name]

    with ExitStack() as stack:
        for name in functions:
            stack.enter_context(replaced(random, name, other(name)))
        yield


@contextmanager
def moments_replaced(
    layer: keras.layers.BatchNormalization, moments: Callable[..., tuple[tf.Tensor, tf.Tensor]]
) -> Iterator[None]:
    """Within, a BatchNormalization takes its batch's mean and variance from `moments`.

    Keras' `call` computes them, updates the statistics and normalizes in one: there is no way in
    but to repeat all of it. Since 3.0.5.

    Args:
        layer: the layer.
        moments: (inputs [n, ...], mask) -> mean and variance, [channels] each.
    """
    with replaced(layer, "_moments", lambda _: moments):
        yield


def surroundings() -> Callable[[], AbstractContextManager[None]]:
    """A maker of contexts in which layers are called as they would be here.

    They take `training`, and the dtype of what they compute, from the layers around them, of which
    the backward pass knows nothing any more; there is no public way to either. Since 3.0.5.
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
# name of its own. Since 3.10.
ImageAugmentation = keras.layers.MixUp.__base__


# Variables.


def stored_value(variable: keras.Variable) -> tf.Variable | None:
    """TensorFlow's variable behind Keras'; None where it is still to be made.

    `variable.value` hands out the same, but in a StatelessScope what the scope says, or a
    placeholder: a scope that reads it itself has no public way. Since 3.0.5.
    """
    return variable._value


@contextmanager
def stored_in(
    variables: Sequence[keras.Variable], others: Sequence[tf.Variable]
) -> Iterator[None]:
    """Within, Keras' variables keep their values in other variables of TensorFlow.

    A StatelessScope would replace values by tensors, which an optimizer cannot assign to on
    TensorFlow. Since 3.0.5.
    """
    before = [variable._value for variable in variables]
    try:
        for variable, other in zip(variables, others, strict=True):
            variable._value = other
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable._value = value


def optimized_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that a built optimizer was built for, in order.

    `optimizer.variables` has those of its own alone. Since 3.0.5.
    """
    return optimizer._trainable_variables
