"""Keras' layers as augmentation: their seed generators start from a seed that they are given.

    RandomFlip,RandomRotation(0.1)     of each example: x, its own seed -> x
    MixUp, CutMix                      of each global batch: x, y, the batch's own seed -> x, y
"""

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.app import named
from towers.machine.keras_internals import ImageAugmentation

MIXING = ("CutMix", "MixUp")  # examples of a batch with each other
_NONE = (
    "CenterCrop", "Resizing",  # change the size
    "MaxNumBoundingBoxes",  # changes no image
    "AugMix",  # Keras 3.15 chooses its operations with Python's `random`, once for a process
)

NAMES = tuple(
    name for name, value in sorted(vars(keras.layers).items())
    if isinstance(value, type) and issubclass(value, ImageAugmentation)
    and name not in _NONE
)


def named_layers(
    text: str, dtype: str, other: str
) -> tuple[list[keras.layers.Layer], list[keras.layers.Layer]]:
    """The layers that change each example, and those that mix a batch, by their names in Keras.

    A layer with a `value_range` has (0, 1), the range of towers' images, unless it is given.

    Args:
        text: "RandomFlip,RandomRotation(factor=0.1),MixUp"; arguments are Python's literals.
        dtype: of x.
        other: what else `augment` may be, for the error.

    Raises:
        ValueError: there is no such layer, it does not take the arguments, or a mixing one does not
            come last.
    """
    try:
        body: Any = ast.parse(f"[{text}]", mode="eval").body
        calls = [part if isinstance(part, ast.Call) else ast.Call(part, [], [])
                 for part in body.elts]
        parts = [
            (call.func.id, [ast.literal_eval(each) for each in call.args],  # type: ignore
             {str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
            for call in calls
        ]
    except (SyntaxError, ValueError, AttributeError):
        raise ValueError(
            f"augment ({text!r}) must be {other}, package.module:function, or layers of Keras by "
            "name, such as RandomFlip,RandomRotation(factor=0.1)."
        ) from None
    names = [name for name, _, _ in parts]
    wrong = next((name for name in names if name not in NAMES), None)
    if wrong is not None or not names:
        raise named.unknown_name(wrong or text, "augment", (other, *NAMES))
    layers = [_layer(text, dtype, *part) for part in parts]
    count = sum(name not in MIXING for name in names)
    if any(name in MIXING for name in names[:count]):
        raise ValueError(
            f"augment ({text!r}): {' and '.join(MIXING)} mix the examples of a batch that all else "
            "has changed; name them last."
        )
    return layers[:count], layers[count:]


def of_layers(layers: Sequence[keras.layers.Layer], x_spec: Any) -> Callable[[Any, tf.Tensor], Any]:
    """Keras layers, one after the other, as a function (x, seed) -> x of an example.

    Args:
        layers: as they are called on a batch, such as keras.layers.RandomRotation.
        x_spec: of one x.

    Raises:
        ValueError: a layer has weights to train, or keeps something from call to call.
    """

    def call(x: Any) -> Any:
        batch = tf.nest.map_structure(lambda tensor: tensor[tf.newaxis], x)
        for layer in layers:
            batch = layer(batch, training=True)
        return tf.nest.map_structure(lambda tensor: tensor[0], batch)

    call(tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), x_spec))  # builds them
    return _drawing_from_seed(layers, call)


def mixing_of(layers: Sequence[keras.layers.Layer]) -> Callable[[Any, tf.Tensor], Any]:
    """MixUp and CutMix, one after the other, as a function ((x, y), seed) -> (x, y) of a batch."""

    def call(batch: Any) -> Any:
        x, y = batch
        found = {"images": x, "labels": y}
        for layer in layers:
            found = layer(found, training=True)
        return tf.ensure_shape(found["images"], x.shape), tf.ensure_shape(found["labels"], y.shape)

    return _drawing_from_seed(layers, call)


def _drawing_from_seed(
    layers: Sequence[keras.layers.Layer], call: Callable[[Any], Any]
) -> Callable[[Any, tf.Tensor], Any]:
    """(values, seed) -> call(values), drawn from the seed; the layers are built."""
    trained = next((layer for layer in layers if layer.trainable_variables), None)
    if trained is not None:
        raise ValueError(
            f"augment: {trained.name} has weights to train, which nothing would train; leave it to "
            "the model."
        )
    weights = [weight for layer in layers for weight in layer.weights]
    kept = set(map(id, weights))
    states = [v for layer in layers for v in layer.variables if id(v) not in kept]

    def drawn(values: Any, seed: tf.Tensor) -> Any:
        keys = tf.random.split(seed, max(1, len(states)))
        mapping = [(v, tf.cast(keys[place], v.dtype)) for place, v in enumerate(states)]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            result = call(values)
        for variable in weights:
            if scope.get_current_value(variable) is not None:
                raise ValueError(f"{variable.path} changes from call to call; leave it out")
        return result

    return drawn


def _layer(
    text: str, dtype: str, name: str, arguments: list[Any], given: dict[str, Any]
) -> keras.layers.Layer:
    kind = getattr(keras.layers, name)
    try:
        bound = inspect.signature(kind).bind(*arguments, **given)
        if "value_range" in inspect.signature(kind).parameters:
            bound.arguments.setdefault("value_range", (0, 1))
        return kind(*bound.args, **{"dtype": dtype, **bound.kwargs})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"augment ({text!r}): Keras makes no {name} of that: {named.one_line(error)[:300]}."
        ) from None
