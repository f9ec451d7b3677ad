"""Data sets by name: the built-in ones, one file each, and the user's `package.module:function`."""

from collections.abc import Callable

from towers import named
from towers.datasets import cifar10, fashion_mnist, image_folder, mnist, music, npz, synthetic, user
from towers.datasets.dataset import Dataset, check_arrays, num_examples

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
NAMES = tuple(_LOADERS)

__all__ = ["NAMES", "Dataset", "check_arrays", "load", "num_examples"]


def load(
    name: str,
    data_dir: str | None = None,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    own_task: bool = False,
) -> Dataset:
    """The data set of that name.

    Args:
        name: one of `NAMES`, or "package.module:function" (see `user.load`).
        data_dir: where its files are; for "npz", the file. None means the embedded or downloaded
            ones; "npz" and "image_folder" have none.
        input_shape: the shape of one example of "synthetic"; the others know theirs.
        num_classes: the number of labels of "synthetic"; the others know theirs.
        own_task: the model brings its own loss: the examples of "npz" and of a function of one's
            own may have any structure, see `structures`.

    Raises:
        ValueError: the name is unknown, data_dir is given where nothing is read from it, or the
            data cannot be read or are wrong.
    """
    if name not in _LOADERS and ":" not in name:
        raise named.unknown_name(name, "dataset", NAMES)
    if data_dir is not None and (":" in name or name == "synthetic"):
        raise ValueError(
            f"data_dir ({data_dir}) has no effect with dataset={name}, which reads no files "
            "from it; leave it out."
        )
    if ":" in name:
        return user.load(name, own_task)
    if name == "npz":
        return npz.load(data_dir, own_task)
    return _LOADERS[name](data_dir, input_shape, num_classes)
