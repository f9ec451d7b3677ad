"""Examples changed at random while training: x and its own seed -> another x of the same shape.

    seed of an example = (hash(seed of the run, epoch), index of the example)

Nothing else decides what is drawn: neither devices nor workers, nor the step a run goes on from.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from towers.app import named
from towers.app.datasets.keras_augment import MIXING, mixing_of, named_layers, of_layers

Augment = Callable[[Any, tf.Tensor], Any]
Mix = Callable[[Any, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]

CROP_FLIP = "crop_flip"
LARGEST_SMALL = 64  # pixels a side: up to there images are padded, larger ones resized
PADDING = 4  # K. He et al., "Deep residual learning", 2015, section 4.2, for CIFAR-10
# C. Szegedy et al., "Going deeper with convolutions", 2014, section 6: part of the area, aspect.
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)

# TensorFlow's random operations with a state of their own, which no seed of ours reaches.
_STATEFUL = (
    "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal",
    "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle",
    "Multinomial", "StatefulUniform", "StatefulStandardNormalV2", "PyFunc", "EagerPyFunc",
)


def load(name: str, x_spec: Any) -> Augment | None:
    """What `name` changes in each example, traced for examples of one kind; None: nothing.

    Args:
        name: "crop_flip"; or "package.module:function": a function (x, seed) -> x in TensorFlow
            operations, seed an int32 [2] of the example's own, or one without arguments that
            returns a Keras layer, such as a Sequential of random layers; or layers of Keras by
            name, see `keras_augment.named_layers`.
        x_spec: tf.TensorSpec of one x, or a structure of them.

    Raises:
        ValueError: the name is unknown, or what it names changes the shape of x, or draws random
            numbers that do not come from the seed.
    """
    if ":" in name:
        return _traced(name, _import(name, x_spec), x_spec)
    if not isinstance(x_spec, tf.TensorSpec) or x_spec.shape.rank != 3:
        raise ValueError(
            f"augment={name} needs images [height, width, channels], and x is "
            f"{tf.nest.map_structure(lambda spec: tuple(spec.shape), x_spec)}; name a function "
            "of your own."
        )
    if name == CROP_FLIP:
        return _traced(name, crop_flip, x_spec)
    layers, _ = named_layers(name, x_spec.dtype.name, CROP_FLIP)
    return _traced(name, of_layers(layers, x_spec), x_spec) if layers else None


def load_mix(name: str, x_spec: Any, y_spec: Any, sample_weight: Any) -> Mix | None:
    """What mixes the examples of a batch, ((x, y), seed) -> (x, y); None where `name` mixes none.

    Args:
        name: see `load`.
        x_spec, y_spec, sample_weight: of a batch; None for what is absent.

    Raises:
        ValueError: labels are not one-hot, or examples have weights.
    """
    if ":" in name or not any(each in name for each in MIXING):
        return None
    _, layers = named_layers(name, x_spec.dtype.name, CROP_FLIP)
    is_one_hot = isinstance(y_spec, tf.TensorSpec) and y_spec.shape.rank == 2
    if not is_one_hot or y_spec.dtype.is_integer or sample_weight is not None:
        raise ValueError(
            f"augment ({name!r}) mixes examples, for which labels must be one-hot, without sample "
            "weights: give y as float32 [N, classes], and a model that is compiled with "
            f"categorical_crossentropy; or leave out {' and '.join(MIXING)}."
        )
    return _traced(name, mixing_of(layers), (x_spec, y_spec))


def batch_seed(key: int, step: tf.Tensor) -> tf.Tensor:
    """The int32 [2] of a global batch, and of no example; `key` hashes the run's seed and epoch."""
    return example_seed(key, -1 - step)


def example_seed(key: int, index: tf.Tensor) -> tf.Tensor:
    """The int32 [2] of an example; `key` hashes the run's seed and the epoch."""
    return tf.stack([tf.constant(key % 2**31, tf.int32), tf.cast(index, tf.int32)])


def crop_flip(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """An image [height, width, channels]: a random part, of its size, mirrored or not.

    Up to `LARGEST_SMALL` pixels a side it is padded with zeros and cropped to its size; of a larger
    one a part is resized to its size.
    """
    if max(x.shape[0], x.shape[1]) <= LARGEST_SMALL:
        # One draw for all: these small operations cost the time.
        *offsets, draw = tf.unstack(tf.random.stateless_uniform([3], seed))
        begin = tf.cast(tf.stack(offsets) * (2 * PADDING + 1), tf.int32)
        padded = tf.pad(x, [[PADDING, PADDING], [PADDING, PADDING], [0, 0]])
        cropped = tf.slice(padded, tf.concat([begin, [0]], 0), x.shape)
    else:
        crop_seed, flip_seed = tf.unstack(tf.random.split(seed, 2))
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            x.shape, tf.zeros([1, 0, 4]), crop_seed, aspect_ratio_range=ASPECT, area_range=AREA,
            use_image_if_no_bounding_boxes=True,
        )
        resized = tf.image.resize(tf.slice(x, begin, size), x.shape[:2])
        cropped, draw = tf.cast(resized, x.dtype), tf.random.stateless_uniform([], flip_seed)
    mirrored = tf.cond(draw < 0.5, lambda: tf.reverse(cropped, [1]), lambda: cropped)
    return tf.ensure_shape(mirrored, x.shape)


def _traced(name: str, function: Augment, spec: Any) -> Augment:
    """The function for values of that spec, which it keeps; it draws from its seed alone."""
    traced = tf.function(function, autograph=False)
    try:
        concrete = traced.get_concrete_function(spec, tf.TensorSpec([2], tf.int32))
    except Exception as error:  # whatever the user's function raises while it is traced
        raise ValueError(f"augment ({name!r}) fails: {named.one_line(error)[:500]}.") from error
    before, after = _described(spec), _described(concrete.structured_outputs)
    if before != after:
        raise ValueError(
            f"augment ({name!r}) makes {after} of {before}; examples must keep their structure, "
            "shape and dtype, for the test examples do."
        )
    operations = {op.type for op in concrete.graph.get_operations()}
    for body in concrete.graph.as_graph_def().library.function:
        operations |= {node.op for node in body.node_def}
    if found := sorted(operations & set(_STATEFUL)):
        raise ValueError(
            f"augment ({name!r}) uses {', '.join(found)}, which does not draw from the example's "
            "seed, so that a run could not be repeated; use tf.random.stateless_* with it."
        )
    return traced


def _described(specs: Any) -> Any:
    return keras.tree.map_structure(lambda s: f"{s.dtype.name} {tuple(s.shape)}", specs)


def _import(name: str, x_spec: Any) -> Augment:
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
    return of_layers([made], x_spec)
