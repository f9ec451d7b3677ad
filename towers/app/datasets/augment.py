"""Changes examples at random while training; shapes stay.

    seed of an example = (hash(seed of the run, epoch), index of the example)
    (x, its seed) -> x

The random numbers depend on this seed alone: not on devices, workers or interruptions.
Keras' layers draw from seed generators, which start from the seed.
"""

import inspect
from collections.abc import Callable

import keras
import tensorflow as tf

from towers.app import named
from towers.step.structures import Structure, is_composite

Change = Callable[[Structure, tf.Tensor], Structure]  # (x, seed) -> x

CROP_FLIP = "crop_flip"
_PADDING = 4  # K. He et al., "Deep residual learning", 2015, section 4.2, for CIFAR-10
# C. Szegedy et al., "Going deeper with convolutions", 2014, section 6: part of the area, aspect.
_AREA, _ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)

# These TensorFlow operations draw from a hidden state, which the example's seed does not set.
_STATEFUL = set(
    "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal RandomGamma "
    "ParameterizedTruncatedNormal RandomPoissonV2 RandomShuffle Multinomial StatefulUniform "
    "StatefulStandardNormalV2 PyFunc EagerPyFunc".split()
)


def load(name: str, x: Structure) -> Change:
    """Returns a traced function (x, seed) -> x for an example.

    name: "crop_flip", or "package.module:function". The function is (x, seed) -> x in TensorFlow
        operations, with an int32 [2] seed for each example. Or it takes nothing, and returns a
        Keras layer, such as a `Sequential` of random layers.
    x: the specs of a batch's x.
    """
    if any(map(is_composite, tf.nest.flatten(x))):
        raise ValueError("augment needs dense examples, and x is ragged or sparse: leave it out.")
    spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape[1:], part.dtype), x)
    if ":" in name:
        return _traced(name, _import(name, spec), spec)
    if name != CROP_FLIP:
        raise ValueError(
            f"augment ({name!r}) must be {CROP_FLIP} or package.module:function. For layers of "
            "Keras, give a function without arguments that returns keras.Sequential([...]) of them."
        )
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank != 3:
        shapes = tf.nest.map_structure(lambda part: tuple(part.shape), spec)
        raise ValueError(
            f"augment={name} needs images [height, width, channels], and x is {shapes}. Give a "
            "custom function."
        )
    return _traced(name, crop_flip, spec)


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
            x.shape,
            tf.zeros([1, 0, 4]),
            crop_seed,
            aspect_ratio_range=_ASPECT,
            area_range=_AREA,
            use_image_if_no_bounding_boxes=True,
        )
        resized = tf.image.resize(tf.slice(x, begin, size), x.shape[:2])
        cropped, draw = tf.cast(resized, x.dtype), tf.random.stateless_uniform([], flip_seed)
    mirrored = tf.cond(draw < 0.5, lambda: tf.reverse(cropped, [1]), lambda: cropped)
    return tf.ensure_shape(mirrored, x.shape)


def _traced(name: str, function: Change, spec: Structure) -> Change:
    """Traces the function. Raises ValueError if it changes shapes or draws without its seed."""
    traced = tf.function(function, autograph=False)
    try:
        concrete = traced.get_concrete_function(spec, tf.TensorSpec([2], tf.int32))
    except Exception as error:  # the user's function may raise anything while it is traced
        raise ValueError(f"augment ({name!r}) fails: {named.one_line(error)[:500]}.") from error
    before, after = _described(spec), _described(concrete.structured_outputs)
    if before != after:
        raise ValueError(
            f"augment ({name!r}) makes {after} of {before}; keep structure, shape and dtype."
        )
    graph = concrete.graph.as_graph_def()
    used = {node.op for node in graph.node}
    for body in graph.library.function:
        used.update(node.op for node in body.node_def)
    if found := sorted(used & _STATEFUL):
        raise ValueError(
            f"augment ({name!r}) uses {', '.join(found)}, which does not draw from the example's "
            "seed; use tf.random.stateless_* with it."
        )
    return traced


def _described(specs: Structure) -> object:
    return keras.tree.map_structure(lambda s: f"{s.dtype.name} {tuple(s.shape)}", specs)


def _import(name: str, spec: Structure) -> Change:
    function = named.import_function(name, "augment")
    parameters = len(inspect.signature(function).parameters)
    if parameters == 2:
        return function
    if parameters == 0:
        made = function()
        if isinstance(made, keras.layers.Layer):
            return _of_layer(made, spec)
    raise ValueError(
        f"augment ({name!r}) must be a function (x, seed) -> x, or one without arguments that "
        "returns a Keras layer."
    )


def _of_layer(layer: keras.layers.Layer, spec: Structure) -> Change:
    """Makes a function of (x, seed) from a layer that takes batches and draws random numbers."""

    def call(x: Structure) -> Structure:
        batch = layer(tf.nest.map_structure(lambda tensor: tensor[tf.newaxis], x), training=True)
        return tf.nest.map_structure(lambda tensor: tensor[0], batch)

    call(tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), spec))  # builds it
    if layer.trainable_variables:
        raise ValueError(
            f"augment: {layer.name} has weights to train, which nothing would train; leave it out."
        )
    weights = layer.weights
    known = set(map(id, weights))
    states = [variable for variable in layer.variables if id(variable) not in known]

    def drawn(x: Structure, seed: tf.Tensor) -> Structure:
        keys = tf.random.split(seed, max(1, len(states)))
        mapping = [(v, tf.cast(keys[place], v.dtype)) for place, v in enumerate(states)]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            result = call(x)
        for variable in weights:
            if scope.get_current_value(variable) is not None:
                raise ValueError(f"{variable.path} changes from call to call; leave it out")
        return result

    return drawn
