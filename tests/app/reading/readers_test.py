"""Readers give the same batches whoever reads; a reader that fails, hangs or is gone is named."""

import subprocess
import sys

import numpy as np
import pytest

from tests.app.datasets.sources import Pixels, arrays
from tests.processes import has_ended
from tests.real_workers import ROOT
from towers.app.reading.examples import Source, read_example
from towers.app.reading.readers import Readers

BATCHES = [np.array([3, 1, 4, 15, 9]), np.array([2, 6]), np.array([5])]
# A parent that starts two readers, whose source hangs at once, and is killed.
ORPHANS = """
import multiprocessing, os, threading, time
from tests.app.datasets.sources import Pixels
from tests.app.reading.readers_test import BATCHES, source
from towers.app.reading.readers import Readers
if __name__ == "__main__":
    readers = Readers(source(hangs=3), 2, 60).read(BATCHES)
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
    return [(indices.tolist(), [a.tolist() for a in found]) for indices, found in
            readers.read(batches)]


@pytest.fixture(name="readers", params=[1, 2], scope="module")
def _readers(request):
    found = Readers(source(raises=17), request.param, timeout=60)
    yield found
    found.close()


def test_batches_come_whole_and_in_order_whatever_reading_was_left(readers):
    x, y = arrays(20)
    expected = [(batch.tolist(), [x[batch].tolist(), y[batch].tolist()]) for batch in BATCHES]
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


@pytest.mark.parametrize("fault, timeout, message", [
    ({"hangs": 3}, 1.5, "here: example 3 takes longer than data_timeout="),
    ({"dies": 2}, 60, "has ended by signal 9 at example 2"),
])
def test_an_example_that_hangs_or_kills_its_process_is_named(fault, timeout, message):
    with pytest.raises(ValueError, match=message):
        read(Readers(source(**fault), 1, timeout), [np.arange(5)])


def test_what_cannot_be_pickled_is_refused_with_the_way_out():
    unpicklable = source()
    unpicklable.examples.shape = lambda: None
    with pytest.raises(ValueError, match="data_workers=2 processes: .*data_workers=0"):
        read(Readers(unpicklable, 2, timeout=60))


def test_readers_end_with_the_process_that_was_killed_even_while_they_hang(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60,
                          cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == -9, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert all(map(has_ended, pids))


def test_no_reader_waits_for_tensorflow():
    code = "import sys, towers.app.reading.readers; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
