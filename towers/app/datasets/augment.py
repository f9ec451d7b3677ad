"""Changes examples at random while training; shapes stay.

    seed of an example = (hash(seed of the run, epoch), index of the example)
    crop_flip, RandomFlip,RandomRotation(0.1)     for each example: x, its seed -> x
    MixUp, CutMix                                 for each global batch: (x, y), its seed -> (x, y)

The random numbers depend on this seed alone: not on devices, workers or interruptions.
Keras' layers draw from seed generators, which start from the seed.
"""

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.app import named
from towers.machine.keras_internals import ImageAugmentation
from towers.step.structures import is_composite

Change = Callable[[Any, tf.Tensor], Any]  # (x, seed) -> x, or ((x, y), seed) -> (x, y)

CROP_FLIP = "crop_flip"
_PADDING = 4  # K. He et al., "Deep residual learning", 2015, section 4.2, for CIFAR-10
# C. Szegedy et al., "Going deeper with convolutions", 2014, section 6: part of the area, aspect.
_AREA, _ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)

MIXING = ("CutMix", "MixUp")  # they mix the examples of a batch with each other
_NO_LAYERS = (
    "CenterCrop", "Resizing",  # change the size
    "MaxNumBoundingBoxes",  # changes no image
    "AugMix",  # Keras 3.15 chooses its operations with Python's `random`, once for a process
)
LAYERS = tuple(
    name for name, kind in sorted(vars(keras.layers).items())
    if isinstance(kind, type) and issubclass(kind, ImageAugmentation) and name not in _NO_LAYERS
)

# These TensorFlow operations draw from a hidden state, which the example's seed does not set.
_STATEFUL = {
    "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal",
    "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle",
    "Multinomial", "StatefulUniform", "StatefulStandardNormalV2", "PyFunc", "EagerPyFunc",
}


def load(
    name: str, x: Any, y: Any = None, sample_weight: Any = None
) -> tuple[Change | None, Change | None]:
    """Returns (x, seed) -> x for an example, and ((x, y), seed) -> (x, y) for a batch, or None.

    name: "crop_flip", "package.module:function", or Keras layers by name, such as
        "RandomFlip,RandomRotation(factor=0.1),MixUp". The function is (x, seed) -> x in TensorFlow
        operations, with an int32 [2] seed for each example; or it takes nothing and returns a Keras
        layer.
    x, y, sample_weight: the specs of a batch; None for absent parts.
    """
    if any(map(is_composite, tf.nest.flatten(x))):
        raise ValueError("augment needs dense examples, and x is ragged or sparse: leave it out.")
    spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape[1:], part.dtype), x)
    if ":" in name:
        return _traced(name, _import(name, spec), spec), None
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank != 3:
        shapes = tf.nest.map_structure(lambda part: tuple(part.shape), spec)
        raise ValueError(
            f"augment={name} needs images [height, width, channels], and x is {shapes}. Give a "
            "custom function."
        )
    if name == CROP_FLIP:
        return _traced(name, crop_flip, spec), None
    layers = _named_layers(name, spec.dtype.name)
    mixing = [layer for layer in layers if type(layer).__name__ in MIXING]
    changing = layers[: len(layers) - len(mixing)]
    if [*changing, *mixing] != layers:
        raise ValueError(
            f"augment ({name!r}): {' and '.join(MIXING)} mix the examples of a batch that all else "
            "has changed; name them last."
        )
    is_one_hot = isinstance(y, tf.TensorSpec) and y.shape.rank == 2 and y.dtype.is_floating
    if mixing and (not is_one_hot or sample_weight is not None):
        raise ValueError(
            f"augment ({name!r}) mixes examples, for which labels must be one-hot, without sample "
            "weights: give y as float32 [N, classes], and a model that is compiled with "
            f"categorical_crossentropy; or leave out {' and '.join(MIXING)}."
        )

    def mix(batch: Any) -> Any:
        x, y = batch
        found = {"images": x, "labels": y}
        for layer in mixing:
            found = layer(found, training=True)
        return tf.ensure_shape(found["images"], x.shape), tf.ensure_shape(found["labels"], y.shape)

    return (
        _traced(name, _of_layers(changing, spec), spec) if changing else None,
        _traced(name, _drawing_from_seed(mixing, mix), (x, y)) if mixing else None,
    )


def example_seed(key: int, index: tf.Tensor) -> tf.Tensor:
    """Returns the seed of an example, int32 [2]. key: a hash of the run's seed and the epoch."""
    return tf.stack([tf.constant(key % 2**31, tf.int32), tf.cast(index, tf.int32)])


def crop_flip(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Crops an image [height, width, channels] at random, and mirrors it with probability 1/2.

    An image of up to 64 pixels a side is padded with zeros and cropped to its size. In a larger
    image, a random part is resized to its size.
    """
    if max(x.shape[0], x.shape[1]) <= 64:
        # One draw gives all three numbers: these small operations take most of the time.
        *offsets, draw = tf.unstack(tf.random.stateless_uniform([3], seed))
        begin = tf.cast(tf.stack(offsets) * (2 * _PADDING + 1), tf.int32)
        padded = tf.pad(x, [[_PADDING, _PADDING], [_PADDING, _PADDING], [0, 0]])
        cropped = tf.slice(padded, tf.concat([begin, [0]], 0), x.shape)
    else:
        crop_seed, flip_seed = tf.unstack(tf.random.split(seed, 2))
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            x.shape, tf.zeros([1, 0, 4]), crop_seed, aspect_ratio_range=_ASPECT, area_range=_AREA,
            use_image_if_no_bounding_boxes=True,
        )
        resized = tf.image.resize(tf.slice(x, begin, size), x.shape[:2])
        cropped, draw = tf.cast(resized, x.dtype), tf.random.stateless_uniform([], flip_seed)
    mirrored = tf.cond(draw < 0.5, lambda: tf.reverse(cropped, [1]), lambda: cropped)
    return tf.ensure_shape(mirrored, x.shape)


def _traced(name: str, function: Change, spec: Any) -> Change:
    """Traces the function. Raises ValueError if it changes shapes or draws without its seed."""
    traced = tf.function(function, autograph=False)
    try:
        concrete = traced.get_concrete_function(spec, tf.TensorSpec([2], tf.int32))
    except Exception as error:  # the user's function may raise anything while it is traced
        raise ValueError(f"augment ({name!r}) fails: {named.one_line(error)[:500]}.") from error
    before, after = (
        keras.tree.map_structure(lambda s: f"{s.dtype.name} {tuple(s.shape)}", specs)
        for specs in (spec, concrete.structured_outputs)
    )
    if before != after:
        raise ValueError(
            f"augment ({name!r}) makes {after} of {before}; keep structure, shape and dtype."
        )
    graph = concrete.graph.as_graph_def()
    bodies = [graph.node, *(body.node_def for body in graph.library.function)]
    if found := sorted({node.op for body in bodies for node in body} & _STATEFUL):
        raise ValueError(
            f"augment ({name!r}) uses {', '.join(found)}, which does not draw from the example's "
            "seed; use tf.random.stateless_* with it."
        )
    return traced


def _import(name: str, spec: Any) -> Change:
    function = named.import_function(name, "augment")
    parameters = len(inspect.signature(function).parameters)
    if parameters == 2:
        return function
    made = function() if parameters == 0 else None
    if not isinstance(made, keras.layers.Layer):
        raise ValueError(
            f"augment ({name!r}) must be a function (x, seed) -> x, or one without arguments that "
            "returns a Keras layer."
        )
    return _of_layers([made], spec)


# Keras' layers


def _named_layers(text: str, dtype: str) -> list[keras.layers.Layer]:
    """Makes the layers in a text such as "RandomFlip,RandomRotation(0.1)", for x of this dtype.

    Arguments are Python literals. `value_range` is (0, 1) by default, the range of towers' images.
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
            f"augment ({text!r}) must be {CROP_FLIP}, package.module:function, or layers of Keras "
            "by name, such as RandomFlip,RandomRotation(factor=0.1)."
        ) from None
    wrong = [name for name, _, _ in parts if name not in LAYERS]
    if wrong or not parts:
        raise named.unknown_name((wrong or [text])[0], "augment", (CROP_FLIP, *LAYERS))
    layers = []
    for name, arguments, given in parts:
        kind = getattr(keras.layers, name)
        try:
            bound = inspect.signature(kind).bind(*arguments, **given)
            if "value_range" in bound.signature.parameters:
                bound.arguments.setdefault("value_range", (0, 1))
            layers.append(kind(*bound.args, **{"dtype": dtype, **bound.kwargs}))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"augment ({text!r}): Keras makes no {name} of that: {named.one_line(error)[:300]}."
            ) from None
    return layers


def _of_layers(layers: Sequence[keras.layers.Layer], spec: Any) -> Change:
    """Makes a function of an example from layers that are called on a batch, in their order."""
    def call(x: Any) -> Any:
        batch = tf.nest.map_structure(lambda tensor: tensor[tf.newaxis], x)
        for layer in layers:
            batch = layer(batch, training=True)
        return tf.nest.map_structure(lambda tensor: tensor[0], batch)

    call(tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), spec))  # builds them
    return _drawing_from_seed(layers, call)


def _drawing_from_seed(layers: Sequence[keras.layers.Layer], call: Callable[[Any], Any]) -> Change:
    """Returns (values, seed) -> call(values), where the built layers draw from the seed."""
    trained = next((layer for layer in layers if layer.trainable_variables), None)
    if trained is not None:
        raise ValueError(
            f"augment: {trained.name} has weights to train, which nothing would train; leave it "
            "out."
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
