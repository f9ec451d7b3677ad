"""Data sets by name: the built-in ones, one file each, and the user's `package.module:function`."""

from towers.app import named
from towers.app.datasets import (
    cifar10,
    fashion_mnist,
    image_folder,
    mnist,
    music,
    npz,
    record_files,
    synthetic,
    tfds,
    tfrecord,
    user,
)
from towers.app.datasets.dataset import Dataset, check_arrays
from towers.app.datasets.user import num_examples

# To add a data set: a file in this folder with load(data_dir) -> Dataset, and a line here.
_LOADERS = {
    "mnist": mnist.load,
    "fashion_mnist": fashion_mnist.load,
    "cifar10": cifar10.load,
    "music": music.load,
}
_RECORDS = {"array_record": record_files.load_array_records, "tfrecord": tfrecord.load}
NAMES = (*_LOADERS, "image_folder", "npz", "synthetic", *_RECORDS)

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
    is_tfds, is_function = name.startswith(tfds.PREFIX), ":" in name
    if name not in NAMES and not is_function:
        raise named.unknown_name(name, "dataset", NAMES)
    size = image_size and image_folder.shown(tuple(n for n in image_size if n is not None))
    for argument, value, has_effect in (
        ("data_dir", data_dir, is_tfds or not is_function and name != "synthetic"),
        ("features", features, name in _RECORDS),
        ("image_size", size, name == "image_folder"),
    ):
        if value is not None and not has_effect:
            raise ValueError(
                f"{argument} ({value}) has no effect with dataset={name}; leave it out."
            )
    if is_tfds:
        return tfds.load(name, data_dir, own_task)
    if is_function:
        return user.load(name, own_task)
    if name == "image_folder":
        return image_folder.load(data_dir, image_size)
    if name == "npz":
        return npz.load(data_dir, own_task)
    if name == "synthetic":
        return synthetic.load(input_shape, num_classes)
    if name in _RECORDS:
        return _RECORDS[name](data_dir, features)
    return _LOADERS[name](data_dir)
