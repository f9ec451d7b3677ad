"""Fashion-MNIST, Zalando's drop-in replacement for MNIST; downloaded when first used."""

import os

import keras

from towers.app.datasets.dataset import Dataset
from towers.app.datasets.idx import load_directory
from towers.app.named import one_line

NUM_CLASSES = 10
ORIGIN = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"  # Keras' own source
CACHE_DIR: str | None = None  # None: Keras' own, ~/.keras or $KERAS_HOME
# github.com/zalandoresearch/fashion-mnist, README.md. `keras.datasets.fashion_mnist.load_data`
# checks no hash: it would take the half of a file that a killed download left behind.
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def load(data_dir: str | None = None) -> Dataset:
    """Fashion-MNIST: x float32 [N, 28, 28, 1] in [0, 1]; y int32 [N], 0 (T-shirt) ... 9 (boot).

    Args:
        data_dir: a directory with the four IDX files; None means Keras' cache, into which they
            are downloaded once and checked each time.

    Raises:
        ValueError: see `load_directory`; also when the download fails or its hash is wrong.
    """
    directory = _download() if data_dir is None else data_dir
    return load_directory("fashion_mnist", directory, NUM_CLASSES)


def _download() -> str:
    """The directory of the four files, fetched where they are missing or differ from MD5."""
    for file_name, md5 in MD5.items():
        try:
            path = keras.utils.get_file(
                file_name,
                ORIGIN + file_name,
                file_hash=md5,
                hash_algorithm="md5",
                cache_subdir=os.path.join("datasets", "fashion-mnist"),
                cache_dir=CACHE_DIR,
            )
        except Exception as error:  # get_file raises bare Exception when there is no network
            raise ValueError(
                f"dataset=fashion_mnist: cannot download {file_name}: {one_line(error)}. Put "
                f"{', '.join(MD5)} into a directory by hand and use data_dir=DIR. On Debian, "
                "apt-get install dataset-fashion-mnist, then "
                "data_dir=/usr/share/datasets/fashion-mnist."
            ) from None
    return os.path.dirname(path)
