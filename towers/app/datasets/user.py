"""Loads the user's data, and finds out which kind they are: arrays, tf.data and so on.

`package.module:function` returns (train, test), or they are given in Python.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.app import named
from towers.app.datasets import arrays, pixels, random_access, tf_data
from towers.app.datasets.dataset import Dataset, Found, Split, describe, is_pair
from towers.app.datasets.source import DataSource, InMemory

_FORMS = (
    "((x_train, y_train), (x_test, y_test)), two unbatched tf.data.Datasets of (x, y), or "
    "two sources with __len__ and __getitem__ that give (x, y)"
)


def load(spec: str, custom_loss: bool = False) -> Dataset:
    """Calls the user's function without arguments, which returns (train, test) for `from_splits`.

    Its module may have NUM_CLASSES. Its errors are raised unchanged.
    """
    splits = named.import_function(spec, "dataset")()
    if not is_pair(splits):
        raise ValueError(f"dataset ({spec!r}) returned {describe(splits)}; it must be {_FORMS}.")
    num_classes = None
    if not custom_loss:
        num_classes = getattr(named.import_module(spec, "dataset"), "NUM_CLASSES", None)
    if num_classes is not None and (type(num_classes) is not int or num_classes < 1):
        raise ValueError(
            f"dataset ({spec!r}): NUM_CLASSES ({num_classes!r}) in its module must be a whole "
            "number, at least 1."
        )
    return from_splits(spec, *splits, custom_loss=custom_loss, num_classes=num_classes)


def from_splits(
    name: str,
    train: Any,
    test: Any,
    *,
    custom_loss: bool = False,
    num_classes: int | None = None,
    where: Sequence[str] = (),
) -> Dataset:
    """Makes a data set of the user's training and test data, which have the same form.

    train, test: arrays (x, y) [N, ...] with integer labels y, or examples (x, y) of an unbatched
        tf.data.Dataset (not checked) or a random-access source, which is read while training runs.
    custom_loss: whether the model brings its own loss. x and y may then have any structure, arrays
        and elements may be x or (x, y, sample_weight), and test may be None.
    num_classes: None: 1 + the largest label, which takes one pass over a tf.data.Dataset.
    where: names for train and test, such as their files, shown in errors; () uses `name`.
    """
    if isinstance(train, keras.utils.PyDataset):
        remedy = "Give an object whose __getitem__ gives one example (x, y)"
        raise ValueError(f"dataset ({name!r}) is a PyDataset, which gives batches. {remedy}.")
    makers = _splitter(train), _splitter(test)
    are_arrays = makers[0] is arrays.split_of
    if not custom_loss and (
        makers[0] is not makers[1] or are_arrays and not (is_pair(train) and is_pair(test))
    ):
        what = describe((train, test))
        raise ValueError(f"dataset ({name!r}) is {what}; it must be {_FORMS}.")
    places = where or (f"{name} (train)", f"{name} (test)")
    found = [makers[0](train, places[0], num_classes, custom_loss)]
    if test is not None:
        found.append(makers[1](test, places[1], num_classes, custom_loss))
    (train, *tests), specs, counts = zip(*found, strict=True)
    notes = pixels.notes(*[x for x, _ in specs])
    first, *others = tf.nest.map_structure(lambda spec: spec and tuple(spec.shape), specs)
    if others and others[0] != first:
        raise ValueError(
            f"{places[1]}: examples have shapes {others[0][0]} and {others[0][1]}, but "
            f"examples of {places[0]} have {first[0]} and {first[1]}. Give both the same."
        )
    return Dataset(
        name,
        train,
        tests[0] if tests else None,
        None if custom_loss else max(counts),
        first[0],
        notes,
        divided=pixels.divided_parts(specs[0][0]),
    )


def source_of(split: Split) -> DataSource:
    """Returns the source of a split. Raises ValueError if a tf.data.Dataset has no end."""
    if isinstance(split, tuple):
        return InMemory(split)
    if isinstance(split, tf.data.Dataset):
        return tf_data.from_dataset(split)
    return split


def num_examples(split: Split) -> int:
    """Returns a split's number of examples; a tf.data.Dataset of unknown length is counted."""
    return source_of(split).num_examples


def _splitter(split: object) -> Callable[[Any, str, int | None, bool], Found]:
    """Returns the function that makes a split of such data."""
    if isinstance(split, tf.data.Dataset):
        return tf_data.split_of
    are_arrays = isinstance(split, tuple | list | dict | str | bytes | np.ndarray)
    if not are_arrays and hasattr(split, "__len__") and hasattr(split, "__getitem__"):
        return random_access.split_of
    return arrays.split_of
