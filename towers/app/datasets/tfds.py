"""Loads a data set from TensorFlow Datasets (TFDS), read by index while training runs.

    --dataset=tfds:NAME       --data_dir=DIR: it is prepared there, or TFDS downloads it to there

`tfds.data_source` reads the prepared ArrayRecord files as NumPy arrays, without TensorFlow.
"""

from dataclasses import replace
from typing import Any

from towers.app.datasets.dataset import Dataset
from towers.app.datasets.user import from_splits
from towers.app.named import one_line
from towers.app.reading.examples import Supervised

PREFIX = "tfds:"
_LONGEST = 120  # characters that are kept of a TFDS error, which may list all data sets
_TEST = ("test", "validation")  # the first that exists is used


def load(name: str, data_dir: str | None, custom_loss: bool = False) -> Dataset:
    """Loads the splits "train" and "test" (or "validation"), each example as (x, y).

    Args:
        name: "tfds:NAME", or with a configuration and a version: "tfds:NAME/CONFIG:1.0.0".
        data_dir: the directory of prepared data sets; None: TFDS chooses it.
        custom_loss: whether the model brings its loss: y may be anything, and test may be missing.

    Raises:
        ValueError: the package, the data set, a split, or its `supervised_keys` are missing.
    """
    try:
        import tensorflow_datasets
    except ImportError:
        raise ValueError(
            f"dataset={name} needs the package tensorflow-datasets: pip install 'tf-towers[tfds]'."
        ) from None
    try:
        splits: Any = tensorflow_datasets.data_source(
            name.removeprefix(PREFIX), data_dir=data_dir
        )
    except Exception as error:  # TFDS raises many types of errors
        raise ValueError(f"dataset={name} cannot be loaded: {one_line(error)[:_LONGEST]}") from None
    found = next((which for which in _TEST if which in splits), None)
    info = splits["train"].dataset_info if "train" in splits else None
    if info is None or found is None and not custom_loss or len(info.supervised_keys or ()) != 2:
        raise ValueError(
            f"dataset={name} has the splits {', '.join(splits)}, and must have train, and test or "
            "validation, and say what x and y of its features are. Use "
            "dataset=package.module:function, which returns (train, test) of (x, y)."
        )
    train, test = (
        None if which is None else Supervised(splits[which], *info.supervised_keys)
        for which in ("train", found)
    )
    label = info.features[info.supervised_keys[1]]
    num_classes = getattr(label, "num_classes", None)
    dataset = from_splits(name, train, test, custom_loss=custom_loss, num_classes=num_classes)
    names = None if custom_loss else getattr(label, "names", None)
    return replace(dataset, class_names=tuple(names or ()))
