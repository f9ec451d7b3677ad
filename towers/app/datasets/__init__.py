"""Loads data sets by name: a built-in one, or the user's `package.module:function`."""

import inspect
from collections.abc import Callable
from functools import partial

from towers.app import named
from towers.app.datasets import (
    cifar10,
    fashion_mnist,
    image_folder,
    mnist,
    music,
    npz,
    synthetic,
    user,
)
from towers.app.datasets.dataset import Dataset, check_arrays
from towers.app.datasets.user import num_examples

# To add a data set: a file in this folder with load(data_dir) -> Dataset, and a line here.
_LOADERS: dict[str, Callable[..., Dataset]] = {
    "mnist": mnist.load,
    "fashion_mnist": fashion_mnist.load,
    "cifar10": cifar10.load,
    "music": music.load,
    "image_folder": image_folder.load,
    "npz": npz.load,
    "synthetic": synthetic.load,
}
NAMES = tuple(_LOADERS)

__all__ = ["NAMES", "Dataset", "check_arrays", "load", "num_examples"]


def load(
    name: str,
    data_dir: str | None = None,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    custom_loss: bool = False,
    image_size: tuple[int, int, int | None] | None = None,
) -> Dataset:
    """Loads the data set with this name.

    name: one of `NAMES`, or "package.module:function" that returns (train, test).
    data_dir: the directory of its files; for "npz", the file. None means embedded or downloaded
        files; "npz" and "image_folder" need a value.
    input_shape, num_classes: the shape of one example and the number of labels of "synthetic".
    custom_loss: whether the model brings its own loss. Examples of "npz" and of the user's function
        may then have any structure.
    image_size: (height, width, channels or None) for "image_folder"; None: taken from images.

    Raises ValueError if the name is unknown, data_dir or image_size has no effect with it, or
    the data cannot be read or are wrong.
    """
    loader = partial(user.load, name) if ":" in name else _LOADERS.get(name)
    if loader is None:
        raise named.unknown_name(name, "dataset", NAMES)
    taken = inspect.signature(loader).parameters
    size = image_size and image_folder.describe_shape(n for n in image_size if n is not None)
    for argument, value in (("data_dir", data_dir), ("image_size", size)):
        if value is not None and argument not in taken:
            raise ValueError(
                f"{argument} ({value}) has no effect with dataset={name}; leave it out."
            )
    given = {
        "data_dir": data_dir,
        "input_shape": input_shape,
        "num_classes": num_classes,
        "custom_loss": custom_loss,
        "image_size": image_size,
    }
    return loader(**{key: value for key, value in given.items() if key in taken})
