"""The music data set: what is embedded, and what its files may not be."""

import gzip

import numpy as np
import pytest

from tests.loading import load
from towers.app.datasets import music


def test_the_embedded_melodies_are_windows_over_notes():
    data = load("music")
    assert (data.name, data.num_classes, data.input_shape) == ("music", 128, (49,))
    for (x, y), count in ((data.train, 18_571), (data.test, 2_803)):
        assert x.shape == (count, 49) and y.shape == (count,)
        assert x.dtype == y.dtype == np.int32
        np.testing.assert_array_equal(x[1, :-1], x[0, 1:])  # consecutive windows
        assert x[1, -1] == y[0]
    assert data.train[0][0, :4].tolist() == [74, 74, 74, 76] and data.train[1][0] == 76


ROW = ", ".join(map(str, range(50)))
WHOLE = gzip.compress(ROW.encode(), mtime=0)


@pytest.mark.parametrize("content, message", [
    (gzip.compress(ROW.replace("49", "128").encode()), "note 49 of row 0 is 128, not in 0 to 127"),
    (gzip.compress(ROW.replace("7,", "-7,", 1).encode()), "note 7 of row 0 is -7, not in 0 to 1"),
    (gzip.compress((ROW + ", 1").encode()), "it has 1 rows of 51 notes, not of 50"),
    (gzip.compress(b"", mtime=0), "it has 0 rows"),
    (gzip.compress(ROW.replace("49", "4.5").encode()), "cannot be read: .*4.5"),
    (gzip.compress(f"{ROW}\n1, 2".encode(), mtime=0), "cannot be read"),
    (WHOLE[:-20], "cannot be read"), (b"no gzip", "cannot be read: .*Not a gzipped file"),
    (None, "cannot be read: .*not found"),
])
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_a_directory_of_ones_own_and_what_is_no_such_file(content, message, tmp_path):
    for name in music.FILE_NAMES:
        (tmp_path / name).write_bytes(WHOLE)
    data = music.load(tmp_path)
    assert data.train[0].tolist() == [list(range(49))] and data.train[1].tolist() == [49]
    (tmp_path / "val.csv.gz").unlink()
    if content is not None:
        (tmp_path / "val.csv.gz").write_bytes(content)
    with pytest.raises(ValueError, match=f"val.csv.gz.*{message}"):
        music.load(tmp_path)
