"""A data set of the user's own: `package.module:function` returns (train, test)."""

from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from towers import named
from towers.datasets import pixels
from towers.datasets.arrays import from_arrays
from towers.datasets.dataset import Dataset, check_count
from towers.datasets.random_access import from_source, is_random_access
from towers.datasets.structures import from_splits

_FORMS = (
    "((x_train, y_train), (x_test, y_test)), two unbatched tf.data.Datasets of (x, y), or two "
    "sources with __len__ and __getitem__ that give (x, y)"
)


def load(spec: str, own_task: bool = False) -> Dataset:
    """Calls the function, without arguments, and checks what it returns.

    It returns ((x_train, y_train), (x_test, y_test)), arrays as in `from_arrays`; or a pair of
    unbatched tf.data.Datasets of (x, y), y a scalar integer; or a pair of random-access sources
    (see `random_access.from_source`), which are read while training runs. The number of classes is
    the module's NUM_CLASSES, else 1 + the largest label (one pass over a tf.data.Dataset, whose
    values are not checked any further; of a random-access source it must be given). What the
    function itself raises passes through.

    For a model that brings its own task it returns (train, test) of any structure, see
    `structures.from_splits`; test may be None.

    Args:
        spec: "package.module:function".
        own_task: the model brings its own loss.

    Raises:
        ValueError: it cannot be imported, or returns something else.
    """
    function = named.import_function(spec, "dataset")
    num_classes = named_classes(spec, "dataset")
    splits = function()
    if own_task and _is_pair(splits):
        return from_splits(spec, *splits)
    if not _is_pair(splits) or not _are_classes(*splits):
        raise ValueError(f"dataset ({spec!r}) returned {_describe(splits)}; it must be {_FORMS}.")
    train, test = splits
    return from_splits_of_classes(spec, train, test, num_classes)


def named_classes(spec: str, argument: str) -> int | None:
    """NUM_CLASSES in the module of `package.module:function`; None where there is none.

    Raises:
        ValueError: it is no count.
    """
    num_classes = getattr(named.import_module(spec, argument), "NUM_CLASSES", None)
    if num_classes is not None and (type(num_classes) is not int or num_classes < 1):
        raise ValueError(
            f"{argument} ({spec!r}): NUM_CLASSES ({num_classes!r}) in its module must be a whole "
            "number, at least 1."
        )
    return num_classes


def from_splits_of_classes(
    name: str, train: Any, test: Any, num_classes: int | None = None
) -> Dataset:
    """A data set for classification; Args and Raises as in `load`."""
    if not _are_classes(train, test):
        what = _describe((train, test))
        raise ValueError(f"dataset ({name!r}) is {what}; it must be {_FORMS}.")
    if isinstance(train, tf.data.Dataset):
        return _from_tf_data(name, train, test, num_classes)
    if is_random_access(train):
        return _from_sources(name, train, test, num_classes)
    where = (f"{name} (x_train, y_train)", f"{name} (x_test, y_test)")
    dataset = from_arrays(name, tuple(train), tuple(test), where, num_classes)
    given = (pixels.specs_of(np.asarray(x)) for x, _ in (train, test))
    return replace(dataset, notes=pixels.notes(*given))


def _are_classes(train: Any, test: Any) -> bool:
    kinds = (lambda split: isinstance(split, tf.data.Dataset), _is_pair, is_random_access)
    return any(is_kind(train) and is_kind(test) for is_kind in kinds)


def _from_tf_data(
    spec: str, train: tf.data.Dataset, test: tf.data.Dataset, num_classes: int | None
) -> Dataset:
    shape = _element_shape(train, f"{spec} (train)")
    test_shape = _element_shape(test, f"{spec} (test)")
    if shape != test_shape:
        raise ValueError(
            f"{spec} (test): examples have shape {test_shape}, but those of train have {shape}."
        )
    for split, what in ((train, "train"), (test, "test")):
        check_count(split, f"{spec} ({what})")
    if num_classes is None:
        num_classes = max(_count_labels(train, spec), _count_labels(test, spec))
    found = pixels.notes(*(split.element_spec[0] for split in (train, test)))
    return Dataset(spec, train, test, num_classes, shape, found)


def _from_sources(spec: str, train: Any, test: Any, num_classes: int | None) -> Dataset:
    splits = [
        from_source(source, f"{spec} ({what})", num_classes)
        for source, what in ((train, "train"), (test, "test"))
    ]
    if splits[0].shape != splits[1].shape:
        raise ValueError(
            f"{spec} (test): examples have shape {splits[1].shape}, but those of train have "
            f"{splits[0].shape}."
        )
    found = pixels.notes(*(split.structure[0] for split in splits))
    return Dataset(spec, splits[0], splits[1], num_classes or 1, splits[0].shape, found)


def _element_shape(split: tf.data.Dataset, where: str) -> tuple[int, ...]:
    spec = split.element_spec
    if not _is_pair(spec) or not all(isinstance(part, tf.TensorSpec) for part in spec):
        raise ValueError(f"{where}: its elements must be (x, y), not {_describe(spec)}.")
    x, y = spec
    if y.shape.rank != 0 or not y.dtype.is_integer:
        raise ValueError(
            f"{where}: y is {y.dtype.name} of shape {y.shape}, but must be one integer; if it is "
            "batched, add .unbatch()."
        )
    if not x.shape.is_fully_defined():
        raise ValueError(f"{where}: x has the unknown shape {x.shape}; use tf.ensure_shape.")
    return tuple(x.shape)


def _count_labels(split: tf.data.Dataset, where: str) -> int:
    labels = split.map(lambda x, y: tf.cast(y, tf.int64))
    smallest, largest = labels.reduce(
        (np.int64(0), np.int64(0)),
        lambda bounds, y: (tf.minimum(bounds[0], y), tf.maximum(bounds[1], y)),
    )
    if smallest < 0:
        raise ValueError(f"{where}: label {int(smallest)} is out of range; 0 is the first.")
    return int(largest) + 1


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _describe(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"
