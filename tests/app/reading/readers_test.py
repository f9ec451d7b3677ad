"""Readers give the same batches whoever reads; an example that fails is named."""

import re
import subprocess
import sys

import numpy as np
import pytest

from tests.app.datasets.sources import arrays, Pixels
from tests.processes import has_ended, ROOT
from towers.app.reading.examples import read_example, Source
from towers.app.reading.readers import Readers


def source_of(examples, num_classes=None):
    return Source(examples, "here", tuple(read_example(examples, 0, "here")[1]), num_classes)


def test_examples_are_read_in_the_order_asked_for_and_each_is_announced():
    seen = []
    source = source_of([(np.full((2, 1), i, np.uint8), i) for i in range(5)], 5)
    x, y = source.read([4, 0, 3], seen.append)
    assert x.dtype == np.uint8 and x[:, 0, 0].tolist() == y.tolist() == seen == [4, 0, 3]


@pytest.mark.parametrize(
    "example, message",
    [
        (
            (np.zeros(3, np.float32), 0),
            "example 1 holds x of float32 and shape (3,), but example 0 "
            "held x of float32 and shape (2,)",
        ),
        (
            (np.zeros(2, np.float32), 7),
            "example 1: label 7 is out of range; labels must lie in 0 to 4",
        ),
        ((np.zeros(2, np.float32),), "example 1 is a tuple, but an example must be (x, y)."),
        ((np.zeros(2, np.float32), "cat"), "example 1: y has dtype <U3, but must hold real"),
    ],
)
def test_an_example_unlike_the_first_is_refused_by_its_index(example, message):
    source = source_of([(np.zeros(2, np.float32), 0), example], 5)
    with pytest.raises(ValueError, match=f"^here: {re.escape(message)}[^\n]*$"):
        source.read([0, 1])


BATCHES = [np.array([3, 1, ~8, 4, 15, 9, ~7]), np.array([2, 6]), np.array([5])]
# A parent that starts two readers, whose source hangs at once, and is killed.
ORPHANS = """
import multiprocessing, os, threading, time
from tests.app.datasets.sources import Pixels
from tests.app.reading.readers_test import BATCHES, source
from towers.app.reading.readers import Readers
if __name__ == "__main__":
    readers = Readers(source(hangs=3), 2).read(BATCHES)
    threading.Thread(target=lambda: next(readers), daemon=True).start()
    while len(multiprocessing.active_children()) < 2:
        time.sleep(0.05)
    time.sleep(1)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), 9)
"""


def source(**arguments):
    examples = Pixels(**arguments)
    return Source(examples, "here", tuple(read_example(Pixels(), 0, "here")[1]), 10)


def read(readers, batches=BATCHES):
    return [
        (indices.tolist(), [a.tolist() for a in found]) for indices, found in readers.read(batches)
    ]


@pytest.fixture(name="readers", params=[1, 2], scope="module")
def _readers(request):
    found = Readers(source(raises=17), request.param)
    yield found
    found.close()


def test_batches_come_whole_and_in_order_whatever_reading_was_left(readers):
    x, y = arrays(20)
    own = [batch[batch >= 0] for batch in BATCHES]  # what is read
    expected = [
        (batch.tolist(), [x[index].tolist(), y[index].tolist()])
        for batch, index in zip(BATCHES, own, strict=True)
    ]
    assert read(readers) == expected
    next(readers.read([np.arange(10)] * 9))
    assert read(readers) == expected
    many = np.arange(1500) % 10  # in pieces
    ((indices, (_, y)),) = readers.read([many])
    assert y.tolist() == indices.tolist() == many.tolist()


def test_an_example_that_cannot_be_read_is_named_and_the_readers_begin_anew(readers):
    with pytest.raises(ValueError, match="here: example 17 cannot be read: KeyError: 'no such"):
        read(readers, [np.arange(10), np.arange(10, 20)])
    assert [indices for indices, _ in read(readers)] == [batch.tolist() for batch in BATCHES]


def test_an_example_that_kills_its_process_is_named():
    with pytest.raises(ValueError, match="was killed by SIGKILL .* at example 2"):
        read(Readers(source(dies=2), 1), [np.arange(5)])


def test_what_cannot_be_pickled_is_refused_with_the_way_out():
    unpicklable = source()
    unpicklable.examples.shape = lambda: None
    with pytest.raises(ValueError, match="data_workers=2 processes: .*data_workers=0"):
        read(Readers(unpicklable, 2))


def test_readers_end_with_the_process_that_was_killed_even_while_they_hang(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == -9, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert all(map(has_ended, pids))
