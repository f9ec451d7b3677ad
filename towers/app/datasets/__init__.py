"""Data sets by name: the built-in ones, one file each, and the user's `package.module:function`."""

from collections.abc import Callable

from towers.app import named
from towers.app.datasets import (
    array_record,
    cifar10,
    fashion_mnist,
    image_folder,
    mnist,
    music,
    npz,
    synthetic,
    tfds,
    tfrecord,
    user,
)
from towers.app.datasets.dataset import Dataset, check_arrays
from towers.app.datasets.user import num_examples

# To add a data set: a file in this folder, and a line here: (data_dir, shape, classes) -> Dataset.
_LOADERS: dict[str, Callable[[str | None, tuple[int, ...], int], Dataset]] = {
    "mnist": lambda data_dir, shape, classes: mnist.load(data_dir),
    "fashion_mnist": lambda data_dir, shape, classes: fashion_mnist.load(data_dir),
    "cifar10": lambda data_dir, shape, classes: cifar10.load(data_dir),
    "music": lambda data_dir, shape, classes: music.load(data_dir),
    "image_folder": lambda data_dir, shape, classes: image_folder.load(data_dir),
    "npz": lambda data_dir, shape, classes: npz.load(data_dir),
    "synthetic": lambda data_dir, shape, classes: synthetic.load(shape, classes),
}
# These take `features`, what parses a record, as well.
_OF_RECORDS: dict[str, Callable[[str | None, str | None], Dataset]] = {
    "array_record": array_record.load,
    "tfrecord": tfrecord.load,
}
NAMES = (*_LOADERS, *_OF_RECORDS)

__all__ = ["NAMES", "Dataset", "check_arrays", "load", "num_examples"]


def load(
    name: str,
    data_dir: str | None = None,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    own_task: bool = False,
    features: str | None = None,
    image_size: tuple[int, int, int | None] | None = None,
) -> Dataset:
    """The data set of that name.

    Args:
        name: one of `NAMES`, "tfds:NAME", or "package.module:function" (see `user.load`).
        data_dir: where its files are; for "npz", the file. None means the embedded or downloaded
            ones; "npz" and "image_folder" have none.
        input_shape: the shape of one example of "synthetic"; the others know theirs.
        num_classes: the number of labels of "synthetic"; the others know theirs.
        own_task: the model brings its own loss: the examples of "npz", of TFDS and of a function
            of one's own may have any structure, see `user`.
        features: "package.module:function", record -> (x, y), of "array_record" and "tfrecord".
        image_size: of "image_folder", see there.

    Raises:
        ValueError: the name is unknown, data_dir, features or image_size is given where it has no
            effect, or the data cannot be read or are wrong.
    """
    if name not in NAMES and ":" not in name:
        raise named.unknown_name(name, "dataset", NAMES)
    is_tfds = name.startswith(tfds.PREFIX)
    reads_files = name != "synthetic" and (is_tfds or ":" not in name)
    if data_dir is not None and not reads_files:
        raise ValueError(
            f"data_dir ({data_dir}) has no effect with dataset={name}, which reads no files "
            "from it; leave it out."
        )
    if features is not None and name not in _OF_RECORDS:
        raise ValueError(
            f"features ({features}) parses records, and dataset={name} has none; leave it out."
        )
    if image_size is not None:
        if name != "image_folder":
            size = image_folder.shown(tuple(n for n in image_size if n is not None))
            raise ValueError(
                f"image_size ({size}) is of dataset=image_folder, and has no effect with "
                f"dataset={name}; leave it out."
            )
        return image_folder.load(data_dir, image_size)
    if is_tfds:
        return tfds.load(name, data_dir, own_task)
    if ":" in name:
        return user.load(name, own_task)
    if name == "npz":
        return npz.load(data_dir, own_task)
    if name in _OF_RECORDS:
        return _OF_RECORDS[name](data_dir, features)
    return _LOADERS[name](data_dir, input_shape, num_classes)
