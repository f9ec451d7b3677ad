"""Loads MNIST, 60,000 training and 10,000 test images of digits, which are in the package."""

from pathlib import Path

from towers.app.datasets.dataset import Dataset
from towers.app.datasets.idx import load_directory

EMBEDDED_DIR = Path(__file__).parent / "data" / "mnist"


def load(data_dir: str | None = None) -> Dataset:
    """Loads x, float32 [N, 28, 28, 1] in [0, 1], and y, int32 [N], the digit.

    data_dir: a directory with the four IDX files; None means the embedded files.
    """
    return load_directory("mnist", data_dir or EMBEDDED_DIR)
