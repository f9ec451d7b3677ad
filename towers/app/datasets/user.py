"""Data of the user's own: here alone it is asked of what kind they are.

`package.module:function` returns (train, test), or they are given in Python.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from towers.app import named
from towers.app.datasets import arrays, pixels, random_access, stateful, tf_data
from towers.app.datasets.dataset import Dataset, Split, describe, is_pair
from towers.resume.in_memory import InMemory
from towers.resume.repeated import has_state
from towers.resume.source import DataSource

_FORMS = (
    "((x_train, y_train), (x_test, y_test)), two unbatched tf.data.Datasets of (x, y), two "
    "sources with __len__ and __getitem__ that give (x, y), or two iterables of (x, y) with a state"
)


def load(spec: str, own_task: bool = False) -> Dataset:
    """Calls the function, without arguments, and checks what it returns.

    It returns ((x_train, y_train), (x_test, y_test)), arrays as in `from_arrays`; or a pair of
    unbatched tf.data.Datasets of (x, y), y a scalar integer; or a pair of random-access sources
    (see `random_access.from_source`), or of iterables with a state (see `stateful`), which are read
    while training runs. The number of classes is the module's NUM_CLASSES, else 1 + the largest
    label (one pass over a tf.data.Dataset, whose values are not checked any further; of what is
    read while training runs it must be given). What the function itself raises passes through.

    For a model that brings its own task it returns (train, test) of any structure, see
    `from_splits`; test may be None.

    Args:
        spec: "package.module:function".
        own_task: the model brings its own loss.

    Raises:
        ValueError: it cannot be imported, or returns something else.
    """
    function = named.import_function(spec, "dataset")
    num_classes = named_classes(spec, "dataset")
    splits = _sized(function(), spec)
    if own_task and is_pair(splits):
        return from_splits(spec, *splits)
    if not is_pair(splits) or not _are_classes(*splits):
        raise ValueError(f"dataset ({spec!r}) returned {describe(splits)}; it must be {_FORMS}.")
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


def _sized(splits: Any, spec: str) -> Any:
    """(train, test), iterables with a state with their counts in the module's NUM_EXAMPLES."""
    counts = getattr(named.import_module(spec, "dataset"), "NUM_EXAMPLES", None)
    if counts is None or not is_pair(splits):
        return splits
    if not is_pair(counts) or not all(type(n) is int and n > 0 for n in counts):
        raise ValueError(
            f"dataset ({spec!r}): NUM_EXAMPLES ({counts!r}) in its module must be two whole "
            "numbers, at least 1: the examples of an epoch, and those to test on."
        )
    pairs = zip(splits, counts, strict=True)
    return tuple(
        stateful.Sized(split, n) if _kind(split) is stateful else split for split, n in pairs
    )


def from_splits_of_classes(
    name: str, train: Any, test: Any, num_classes: int | None = None
) -> Dataset:
    """A data set for classification; Args and Raises as in `load`."""
    if not _are_classes(train, test):
        what = describe((train, test))
        raise ValueError(f"dataset ({name!r}) is {what}; it must be {_FORMS}.")
    return _kind(train).of_classes(name, train, test, num_classes)  # type: ignore[no-any-return]


def from_splits(name: str, train: Any, test: Any) -> Dataset:
    """A data set of any structure; floats become Keras' floatx, as in `fit`.

    uint8 images of x are divided by 255, see `pixels`; all else stays. It is for a model that
    brings its own loss: what they are is its matter.

    Args:
        name: of the data set.
        train: x, (x, y) or (x, y, sample_weight), structures of what `np.asarray` takes; or an
            unbatched tf.data.Dataset of such elements, whose values are not checked; or a
            random-access source of (x, y), or an iterable of them with a state, whose 64-bit
            numbers become 32-bit.
        test: the same; None for no validation.

    Raises:
        ValueError: a part is no array of numbers, holds NaN or infinity, or differs in length; or
            train and test differ in shape.
    """
    stateful.check_apart(name, train, test)
    given = {"train": train} if test is None else {"train": train, "test": test}
    found = {which: _kind(s).of_any(s, f"{name} ({which})") for which, s in given.items()}
    notes = pixels.notes(**{which: x for which, (_, (x, _)) in found.items()})
    shapes = {which: tuple(map(_shapes, specs)) for which, (_, specs) in found.items()}
    for which, (x, y) in shapes.items():
        if (x, y) != shapes["train"]:
            raise ValueError(
                f"{name} ({which}): examples of {_shown(x, y)}, but those of train are of "
                f"{_shown(*shapes['train'])}."
            )
    splits = {which: split for which, (split, _) in found.items()}
    return Dataset(
        name, splits["train"], splits.get("test"), None, shapes["train"][0], notes,
        divided=pixels.divided_parts(found["train"][1][0]),
    )


def source_of(split: Split) -> DataSource:
    """The source of a split. Raises ValueError for a tf.data.Dataset that repeats forever."""
    if isinstance(split, tuple):
        return InMemory(split)
    return tf_data.from_dataset(split) if isinstance(split, tf.data.Dataset) else split


def num_examples(split: Split) -> int:
    """The number of a split's examples; a tf.data.Dataset that does not know it is counted."""
    return source_of(split).num_examples


def _kind(split: Any) -> Any:
    """The module of what the user gives: arrays, where it is nothing else."""
    if isinstance(split, tf.data.Dataset):
        return tf_data
    has_both = hasattr(split, "__len__") and hasattr(split, "__getitem__")
    if isinstance(split, stateful.Sized):
        return stateful
    if isinstance(split, tuple | list | dict | str | bytes | np.ndarray):
        return arrays
    return random_access if has_both else stateful if has_state(split) else arrays


def _are_classes(train: Any, test: Any) -> bool:
    kind = _kind(train)
    return kind is _kind(test) and (kind is not arrays or is_pair(train) and is_pair(test))


def _shapes(specs: Any) -> Any:
    """The structure of a part of an example, of shapes; None for a size that varies."""
    return None if specs is None else tf.nest.map_structure(lambda s: tuple(s.shape), specs)


def _shown(x: Any, y: Any) -> str:
    return f"shape {x}" if y is None else f"shapes {x} and {y}"
