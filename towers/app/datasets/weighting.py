"""Turns labels into sample weights, as Keras does for fit(class_weight=...).

y: classes [B], [B, 1], or one-hot [B, C]   ->   sample_weight [B]
"""

from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.app.class_weight import BALANCED, weights_of
from towers.app.datasets.batches import Examples
from towers.resume.epoch import as_written
from towers.step.sharding import BatchValues
from towers.step.structures import Structure


def weighed(
    examples: Examples, text: str | None, model: keras.Model, num_classes: int | None
) -> tuple[Examples, list[str]]:
    """Returns the examples with sample weights by class, and a line about them for the user.

    text: weights of classes, such as "0:1,1:5", or "balanced"; None: all weigh the same.
    num_classes: None if the built model brings its own loss.
    """
    if text is None:
        return examples, []
    outputs = getattr(model, "output_shape", None)  # of the only output, if there is one
    if not isinstance(outputs, tuple) or outputs[:1] != (None,):
        outputs = None
    _check(examples, outputs)
    if text == BALANCED:
        labels = examples.source.labels
        if labels is None:
            raise ValueError(
                f"class_weight={BALANCED} counts the labels, and these examples are read while "
                "training runs: give the weight of each class, such as class_weight=0:1,1:5."
            )
        weights = balanced(_classes(tf.convert_to_tensor(labels)).numpy())
    else:
        weights = weights_of(text)
        if num_classes is None and outputs and len(outputs) == 2 and outputs[1] != 1:
            num_classes = outputs[1]
        if num_classes is not None and max(weights) >= num_classes:
            raise ValueError(
                f"class_weight ({text}) names class {max(weights)}, and the classes are 0 to "
                f"{num_classes - 1}."
            )
    table = np.ones(max(weights) + 2, keras.config.floatx())  # the last one: for any other class
    table[list(weights)] = list(weights.values())
    last = len(table) - 1

    @as_written
    def weigh(x: Structure, y: tf.Tensor) -> BatchValues:
        classes = _classes(y)
        rows = tf.where((classes >= 0) & (classes < last), classes, last)
        return x, y, tf.gather(tf.constant(table), rows)

    return examples._replace(changes=[*examples.changes, weigh]), [note(weights)]


def _check(examples: Examples, outputs: tuple[int | None, ...] | None) -> None:
    """Raises ValueError unless each example has one class and no sample weight."""
    _, y, sample_weight = examples.specs
    if sample_weight is not None:
        raise ValueError(
            "`class_weight` is given beside data that bring sample weights: multiply these by the "
            "class weights, and leave `class_weight` out."
        )
    rank = isinstance(y, tf.TensorSpec) and y.shape.rank
    is_right = rank == 1
    if rank == 2:
        is_right = y.shape[1] == 1
        if outputs is not None:
            is_right |= len(outputs) == 2 and y.shape[1] == outputs[1]
        else:  # integers [N, T] may be the classes of T tokens
            is_right |= y.dtype.is_floating
    if not is_right:
        raise ValueError(
            "`class_weight` needs one class an example: y of shape [N], [N, 1], or one-hot [N, "
            "classes]. Leave it out, and give sample weights."
        )


def _classes(y: tf.Tensor) -> tf.Tensor:
    """Returns the class of each label, int32 [B]."""
    if y.shape.rank == 2 and y.shape[-1] != 1:
        return tf.argmax(y, axis=-1, output_type=tf.int32)
    flat = tf.reshape(y, [-1])
    if flat.dtype.is_floating:
        flat = tf.round(flat)
    return tf.cast(flat, tf.int32)


def balanced(labels: Sequence[int]) -> dict[int, float]:
    """Returns N / (classes * examples of k) for each class k that occurs in the N labels.

    Source: King and Zeng 2001, Logistic regression in rare events data; scikit-learn's "balanced".
    """
    classes, counts = np.unique(labels, return_counts=True)
    weights = len(labels) / (len(classes) * counts)
    return dict(zip(map(int, classes), map(float, weights), strict=True))


def note(weights: Mapping[int, float]) -> str:
    """Returns a line such as "class weights: 0: 1, 1: 5", with at most 10 classes."""
    pairs = [f"{label}: {weight:.4g}" for label, weight in sorted(weights.items())]
    if len(pairs) > 10:
        pairs[10:] = ["..."]
    return f"class weights: {', '.join(pairs)}"
