"""Keras' private names that towers cannot do without. No other module knows them.

Each part says which need it serves and why no public way does. "Since" is the oldest version of
Keras that it was found in, among the sources of 3.0.5, 3.4.1, 3.10 and 3.15; TensorFlow 2.20 asks
for 3.10 or newer. The tests of this module name the part that a new version breaks.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileLoss

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
    for operation in operations:
        counter = itertools.count()

        def call(
            *args: Any, _operation: Any = operation, _call: Callable = operation.call,
            _counter: Iterator[int] = counter, **kwargs: Any,
        ) -> Any:
            with scope_of(_operation, next(_counter)):
                return _call(*args, **kwargs)

        vars(operation)["call"] = functools.wraps(operation.call)(call)
    try:
        yield
    finally:
        for operation in operations:
            vars(operation).pop("call", None)


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

    replaced: dict[str, Callable[..., Any]] = {
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
    before = {name: getattr(random, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(random, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(random, name, function)


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
    vars(layer)["_moments"] = moments  # not through setattr, which would track it
    try:
        yield
    finally:
        del vars(layer)["_moments"]


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


# Masks.


def keras_mask(tensor: Any) -> tf.Tensor | None:
    """The mask that a layer, or a loss with `ignore_class`, has left on its output, or None.

    Keras' losses and metrics look for it there; `layer.compute_mask` computes a layer's, but not
    which one arrived at the end of a model. Since 3.0.5.
    """
    return getattr(tensor, "_keras_mask", None)


_ACTIVATIONS = {"Sigmoid": tf.nn.sigmoid, "Softmax": tf.nn.softmax}


def marks_of(tensor: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the mask and the logits that Keras' losses and metrics look for beside a tensor.

    Keras computes a crossentropy from the logits if it finds them. `keras.activations` sets them as
    an attribute; else they are the input of the Sigmoid or Softmax operation that made the tensor.
    There is no public way to either (`_get_logits` in keras/src/backend/tensorflow/nn.py). Since
    3.0.5.

    Args:
        tensor: a symbolic tensor [n, ...].

    Returns:
        Tensors [n, ...]: "mask", "logits" (the attribute), "Sigmoid" or "Softmax" (the input of
        that operation); what is absent has no key.
    """
    graph = getattr(tensor, "graph", None)
    marks = {"mask": keras_mask(tensor), "logits": getattr(tensor, "_keras_logits", None)}
    operation = tensor.op if tf.is_symbolic_tensor(tensor) else None
    if marks["logits"] is None and operation is not None and operation.type in _ACTIVATIONS:
        marks[operation.type] = operation.inputs[0]
    return {
        name: mark for name, mark in marks.items()
        if mark is not None and getattr(mark, "graph", None) is graph
    }


def marked(tensor: tf.Tensor, marks: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Attaches the mask and the logits that `marks_of` returned to a tensor; returns the tensor.

    If the logits were an operation's input, the activation is applied to them again, because Keras
    looks for the operation itself.
    """
    for kind, activation in _ACTIVATIONS.items():
        if kind in marks:
            tensor = activation(marks[kind])
    if "mask" in marks:
        tensor._keras_mask = marks["mask"]
    if "logits" in marks:
        tensor._keras_logits = marks["logits"]
    return tensor


# The class of the layers that change images at random, and their labels; it is exported under no
# name of its own. Since 3.10.
ImageAugmentation = keras.layers.MixUp.__base__


# Losses and metrics.

# The class of all losses that are made of a function; it is exported under no name of its own.
# Since 3.0.5.
_LossFunctionWrapper = keras.losses.MeanSquaredError.__base__


def function_loss(function: Callable) -> keras.losses.Loss:
    """The Loss that Keras makes of a function (y_true, y_pred): a mean over examples.

    `keras.losses.get` hands a function back as it is, and a Loss of one's own would have to repeat
    how Keras brings labels and predictions to the same rank.
    """
    return _LossFunctionWrapper(function)


class GivenMetrics(NamedTuple):
    """Arguments of `compile`, as they were given."""

    metrics: Any
    weighted_metrics: Any


def given_metrics(model: keras.Model) -> GivenMetrics:
    """The metrics that a model was compiled with; None where there are none.

    There is no public way to them but serialized ones, which functions of one's own do not survive.
    Since 3.0.5.
    """
    compiled = model._compile_metrics
    if compiled is None:
        return GivenMetrics(None, None)
    return GivenMetrics(compiled._user_metrics, compiled._user_weighted_metrics)


class CompiledLoss(NamedTuple):
    """Arguments of `compile`, as they were given."""

    loss: Any
    loss_weights: Any


def compiled_loss(model: keras.Model) -> CompiledLoss | None:
    """The loss and the weights that a model was compiled with; None where it was without a loss.

    `model.loss` may be an attribute of the user's, and there is no public way to the weights but
    serialized ones. Since 3.0.5.
    """
    compiled = model._compile_loss
    if compiled is None:
        return None
    return CompiledLoss(compiled._user_loss, compiled._user_loss_weights)


class LossTerm(NamedTuple):
    """One loss of a compiled model, and what it is called on.

    loss: the loss. factor: its weight in the total. y, y_pred, sample_weight: the arguments of its
    call, tensors or structures of these; `sample_weight` may be None.
    """

    loss: keras.losses.Loss
    factor: float
    y: Any
    y_pred: Any
    sample_weight: Any


class LossTerms(CompileLoss):
    """Keras' resolution of the losses given to `compile`, which returns terms in place of values.

    Keras matches losses, labels, outputs and weights in one object that has no public name, and
    only while it computes the total. Here each loss notes its arguments. Since 3.7.
    """

    def __init__(self, loss: Any, loss_weights: Any, output_names: Sequence[str] | None) -> None:
        """
        Args:
            loss, loss_weights: as `keras.Model.compile` takes them.
            output_names: the names of the model's outputs, or None.
        """
        if isinstance(loss_weights, int):
            loss_weights = float(loss_weights)
        super().__init__(loss, loss_weights, output_names=output_names)
        self._resolved: list[Any] = []
        self._noted: list[LossTerm] = []

    def terms(self, y: Any, y_pred: Any, sample_weight: Any) -> list[LossTerm]:
        """The terms of the total loss; the first call resolves the losses for good.

        Args:
            y, y_pred, sample_weight: structures of tensors, or of what stands for tensors.

        Raises:
            ValueError or KeyError: the structures do not match, as Keras says it.
        """
        self._noted = []
        with tf.init_scope(), tf.device("/cpu:0"):
            self.call(y, y_pred, sample_weight)
        # For one output Keras computes the first loss of a list alone.
        is_one = not keras.tree.is_nested(y) and not keras.tree.is_nested(y_pred)
        return self._noted[:1] if is_one else self._noted

    def build(self, y_true: Any, y_pred: Any) -> None:
        super().build(y_true, y_pred)
        self._resolved = list(vars(self)["_flat_losses"])
        self._flat_losses = [
            each._replace(loss=functools.partial(self._note, each), loss_weights=None)
            for each in self._resolved
        ]

    @property
    def metrics(self) -> list[None]:
        """No metric for any loss."""
        return [None] * len(self._resolved)

    def _note(self, resolved: Any, y: Any, y_pred: Any, sample_weight: Any) -> float:
        factor = 1.0 if resolved.loss_weights is None else resolved.loss_weights
        self._noted.append(LossTerm(resolved.loss, factor, y, y_pred, sample_weight))
        return 0.0


def track_output_losses(model: keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Feeds the running means of each output's loss, which Keras shows beside the total.

    `model.compute_loss` would add what layers have added, which is in another graph. Since 3.4.1,
    where Keras has these means at all.

    Args:
        model: compiled with a loss.
        y, y_pred, sample_weight: of the global batch.
    """
    model._compile_loss(y, y_pred, sample_weight)


def has_output_losses(model: keras.Model) -> bool:
    """Whether the means that `track_output_losses` feeds are made; it makes them at first."""
    return bool(model._compile_loss.metrics)


def compiled_metrics(model: keras.Model) -> Any:
    """The object that computes a compiled model's metrics; None where there are none.

    It is one of `model.metrics`, where nothing tells it from the others; its `build(y, y_pred)`
    makes their variables without a batch. Since 3.0.5.
    """
    return model._compile_metrics


def metric_direction(metric: keras.metrics.Metric) -> str | None:
    """"up" where a higher value is the better one, "down" where a lower one is; None: unknown.

    Keras' own callbacks ask for it where they are told to find out which epoch is the best; there
    is no public name. Since 3.0.5.
    """
    return getattr(metric, "_direction", None)


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """The running mean of a compiled model's loss.

    The first of what Keras lists as the metrics, also where the user's class lists others. The
    property is public, but its order is written down nowhere. Since 3.0.5.
    """
    return keras.Model.metrics.fget(model)[0]

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
