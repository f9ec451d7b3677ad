"""TensorFlow Datasets: a data set of theirs by name, read by index while training runs.

    --dataset=tfds:NAME       --data_dir=DIR: where it is prepared; else where it is downloaded to

`tfds.data_source` reads the ArrayRecord files that the data set was prepared as, in NumPy alone.
"""

from dataclasses import replace
from typing import Any

from towers.app.datasets.dataset import Dataset
from towers.app.datasets.user import from_splits
from towers.app.named import one_line
from towers.app.reading.examples import Supervised

PREFIX = "tfds:"
_LONGEST = 120  # characters of an error of theirs, which lists all data sets
_TEST = ("test", "validation")  # the first that there is


def load(name: str, data_dir: str | None, own_task: bool = False) -> Dataset:
    """The splits "train" and "test" or "validation", each example as (x, y).

    Args:
        name: "tfds:NAME", with what TFDS takes behind it: "tfds:NAME/CONFIG:1.0.0".
        data_dir: of TFDS; None: its own.
        own_task: y is what the model's own loss takes.

    Raises:
        ValueError: the package is missing, or the data set, a split, or what x and y are.
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
    except Exception as error:  # it raises many kinds
        raise ValueError(f"dataset={name} cannot be loaded: {one_line(error)[:_LONGEST]}") from None
    found = next((which for which in _TEST if which in splits), None)
    info = splits["train"].dataset_info if "train" in splits else None
    if info is None or found is None and not own_task or len(info.supervised_keys or ()) != 2:
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
    dataset = from_splits(name, train, test, own_task=own_task, num_classes=num_classes)
    names = None if own_task else getattr(label, "names", None)
    return replace(dataset, class_names=tuple(names or ()))
