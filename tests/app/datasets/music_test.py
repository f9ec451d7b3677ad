"""The music data set: what is embedded, and what its files may not be."""

import gzip

import numpy as np
import pytest

from towers.app import datasets
from towers.app.datasets import music


def test_the_embedded_melodies_are_windows_over_notes():
    data = datasets.load("music", input_shape=(1,), num_classes=2)
    assert (data.name, data.num_classes, data.input_shape) == ("music", 128, (49,))
    for (x, y), count in ((data.train, 18_571), (data.test, 2_803)):
        assert x.shape == (count, 49) and y.shape == (count,)
        assert x.dtype == y.dtype == np.int32
        assert x.min() >= 0 and max(x.max(), y.max()) <= 127
        np.testing.assert_array_equal(x[1, :-1], x[0, 1:])  # consecutive windows
        assert x[1, -1] == y[0]
    assert data.train[0][0, :4].tolist() == [74, 74, 74, 76] and data.train[1][0] == 76


ROW = ", ".join(map(str, range(50)))


def write(folder, train, test=ROW):
    for name, text in zip(music.FILE_NAMES, (train, test), strict=True):
        (folder / name).write_bytes(gzip.compress(text.encode()))


def test_a_directory_of_ones_own(tmp_path):
    write(tmp_path, f"{ROW}\n{ROW}\n")
    data = music.load(tmp_path)
    assert data.train[0].tolist() == [list(range(49))] * 2
    assert data.train[1].tolist() == [49, 49]
    assert data.test[0].shape == (1, 49)


@pytest.mark.parametrize("text, message", [
    (ROW.replace("49", "128"), "train.csv.gz: note 128 in row 0 is out of range"),
    (f"{ROW}\n{ROW.replace('7,', '-7,', 1)}", "note -7 in row 1"),
    (ROW + ", 1", "1 rows of 51 notes; give rows of 50"),
    ("", "give rows of 50"),
    (ROW.replace("49", "C4"), "train.csv.gz is damaged: .*C4"),
    (ROW.replace("49", "4.5"), "is damaged"),
    (f"{ROW}\n1, 2", "is damaged"),
])
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_other_rows_are_errors(text, message, tmp_path):
    write(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        music.load(tmp_path)


def test_missing_and_damaged_files_are_errors(tmp_path):
    with pytest.raises(ValueError, match="train.csv.gz cannot be read: No such file"):
        music.load(tmp_path)
    write(tmp_path, ROW)
    path = tmp_path / "val.csv.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="val.csv.gz is damaged"):
        music.load(tmp_path)
    path.write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="val.csv.gz is damaged: .*Not a gzipped file"):
        music.load(tmp_path)
