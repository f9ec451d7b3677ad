"""ArrayRecord files as one source, which each process opens for itself."""

import pickle

from tests.app.datasets.sources import Pixels, write_records
from tests.loading import refusal
from towers.app.reading.array_records import ArrayRecords

FEATURES = "tests.app.datasets.sources:from_bytes"


def test_any_record_of_any_file_is_found_also_by_what_was_pickled(tmp_path):
    files = {"a": range(3), "b": range(3, 4), "c": range(4, 9)}
    paths = [write_records(tmp_path / name, which) for name, which in files.items()]
    records = ArrayRecords(paths, FEATURES)
    for source in (records, pickle.loads(pickle.dumps(records))):
        assert len(source) == 9
        for index in (8, 0, 3, 2, 4):
            x, y = source[index]
            assert (x == Pixels()[index][0]).all() and y == index
    (tmp_path / "d").write_bytes(b"no records")
    assert "d cannot be read: " in refusal(ArrayRecords, [*paths, str(tmp_path / "d")], FEATURES)
