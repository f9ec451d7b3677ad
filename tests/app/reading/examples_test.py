"""Examples that are read one by one all look like the first one; what does not is named."""

import pickle

import numpy as np
import pytest

from tests.app.datasets.sources import Pixels, write_records
from tests.loading import refusal
from towers.app.reading.examples import ArrayRecords, Source, read_example

FEATURES = "tests.app.datasets.sources:from_bytes"


def source_of(examples, num_classes=None):
    return Source(examples, "here", tuple(read_example(examples, 0, "here")[1]), num_classes)


def test_examples_are_read_in_the_order_asked_for_and_each_is_announced():
    seen = []
    source = source_of([(np.full((2, 1), i, np.uint8), i) for i in range(5)], 5)
    x, y = source.read([4, 0, 3], seen.append)
    assert x.dtype == np.uint8 and x[:, 0, 0].tolist() == y.tolist() == seen == [4, 0, 3]


@pytest.mark.parametrize(("example", "message"), [
    ((np.zeros(3, np.float32), 0), "example 1 holds x of float32 and shape (3,), but example 0 "
     "held x of float32 and shape (2,)"),
    ((np.zeros(2), 0), "example 1 holds x of float64"),
    (({"x": np.zeros(2, np.float32)}, 0), "example 1 holds x['x'] of float32"),
    ((np.zeros(2, np.float32), 7), "example 1: label 7 is out of range; labels must lie in 0 to 4"),
    ((np.zeros(2, np.float32), (0, 1)), "example 1 holds y[0] of int64"),
    ((np.zeros(2, np.float32),), "example 1 is a tuple, but an example must be (x, y)."),
    ((np.zeros(2, np.float32), "cat"), "example 1: y has dtype <U3, but must hold real"),
    (([[1], [1, 2]], 0), "example 1: x (list) is no array (ValueError: "),
])
def test_an_example_unlike_the_first_is_refused_by_its_index(example, message):
    source = source_of([(np.zeros(2, np.float32), 0), example], 5)
    assert refusal(source.read, [0, 1]).startswith(f"here: {message}")


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
