"""Four small files in MNIST's format."""

import pytest

from tests.app.datasets.idx_files import examples, idx_bytes
from towers.app.datasets.idx import FILE_NAMES


@pytest.fixture
def idx_dir(tmp_path):
    """Writes the four files; keyword arguments such as train_images replace their arrays."""

    def write(spelling="{}", compress=bytes, **replaced):
        (x_train, y_train), (x_test, y_test) = examples(6), examples(3)
        arrays = (x_train, y_train, x_test, y_test)
        for name, array in zip(FILE_NAMES, arrays, strict=True):
            array = replaced.get("_".join(name.split("-")[:2]), array)
            if array is not None:
                file_name = spelling.format(name)
                if spelling.startswith("."):
                    file_name = file_name[1:].replace("-idx", ".idx")
                (tmp_path / file_name).write_bytes(compress(idx_bytes(array)))
        return str(tmp_path)

    return write
