"""ArrayRecord files as one source, which each process opens for itself."""

import pickle

import pytest

from tests.app.datasets.sources import Pixels, to_bytes
from towers.app.reading.array_records import ArrayRecords

FEATURES = "tests.app.datasets.sources:from_bytes"


def write(path, indices):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for index in indices:
        writer.write(to_bytes(index))
    writer.close()
    return str(path)


@pytest.fixture(name="paths")
def _paths(tmp_path):
    files = {"a": range(3), "b": range(3, 4), "c": range(4, 9)}
    return [write(tmp_path / f"{name}.array_record", which) for name, which in files.items()]


def test_any_record_of_any_file_is_found_also_by_what_was_pickled(paths):
    records = ArrayRecords(paths, FEATURES)
    for source in (records, pickle.loads(pickle.dumps(records))):
        assert len(source) == 9
        for index in (8, 0, 3, 2, 4):
            x, y = source[index]
            assert (x == Pixels()[index][0]).all() and y == index


def test_a_file_that_is_none_is_refused_by_its_name(paths, tmp_path):
    (tmp_path / "d.array_record").write_bytes(b"no records")
    with pytest.raises(ValueError, match="d.array_record cannot be read: "):
        ArrayRecords([*paths, str(tmp_path / "d.array_record")], FEATURES)


def test_a_record_beyond_the_last_is_an_index_error(paths):
    with pytest.raises(IndexError):
        ArrayRecords(paths, FEATURES)[9]
