"""Where the time of a run went: parts that add up to the clock, also over processes that died."""

import json
import os
import re
import time
from types import SimpleNamespace

import pytest

from tests import processes
from tests.resuming import FLAGS, RESUME, forked
from towers.app.reporting import time_spent
from towers.app.reporting.report import time_words
from towers.app.reporting.time_spent import PARTS, TimeSpent

NOTE = (  # a process notes when it dies
    "[__import__('time').sleep(0.1), os.write(os.open('ends', os.O_CREAT | os.O_WRONLY | os.O_APPEND), "
    "b'%f\\n' % __import__('time').time()), kill('KILL')]"
)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time_spent, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_time_counts_for_the_innermost_part(clock):
    spent = TimeSpent(3.0)
    for step in (1, 2):
        with spent.in_step(step):
            clock[0] += 5.0 / step
            with spent.within("data"):
                clock[0] += 0.25
    with spent.within("validation"):
        clock[0] += 1.0
    clock[0] += 2.0
    assert spent.total == 3 + 5 + 0.25 + 2.5 + 0.25 + 1 + 2
    found = {part: seconds for part, seconds in spent.seconds.items() if seconds}
    expected = {"first step": 5, "steps": 2.5, "data": 0.5, "validation": 1, "start and end": 5}
    assert found == expected
    shown = "0:14: first step 0:05 (36%), start and end 0:05 (36%), steps 0:02 (18%), "
    shown += "validation 0:01 (7%), data 0:00 (4%)"
    assert time_words(spent, None) == shown
    assert time_words(spent, 360) == f"{shown}; 1.40 at 360.00 an hour"


@pytest.mark.parametrize("text", ["{", '{"seconds": 3}', '{"seconds": {"data": "x"}}'])
def test_a_file_that_cannot_be_read_counts_for_nothing(text, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints/time.json"
    path.write_text(text)
    spent = TimeSpent(1.0)
    with spent.kept_in(tmp_path, pytest.fail):
        pass
    assert spent.num_starts == 1 and 1 <= spent.total < 2
    assert json.loads(path.read_text())["starts"] == 1


def test_a_file_that_cannot_be_opened_is_a_warning(tmp_path):
    warnings = []
    with TimeSpent().kept_in(tmp_path, warnings.append):
        pass
    (warning,) = warnings
    assert warning.startswith(
        f"{tmp_path / 'checkpoints' / 'time.json'} cannot be written (No such"
    )


def test_the_parts_add_up_to_the_clock_of_a_killed_process_and_its_successor(tmp_path):
    processes.run("-c", "pass")  # the server of processes has begun
    begins, flags = [], [*FLAGS, "--checkpoint_every=100", "--price=3600"]
    for fault, code in ((f"step == 7 and {NOTE}", -9), ("", 0)):
        begins.append(time.time())
        process = forked(*flags, cwd=tmp_path, fault=fault)
        said, errors = process.communicate(timeout=300)
        assert process.returncode == code, said + errors
        flags = RESUME
    path = tmp_path / "run/checkpoints/time.json"
    ends = [float((tmp_path / "ends").read_text()), os.stat(path).st_mtime]
    lifetimes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    written = json.loads(path.read_text())
    assert written["starts"] == 2 and list(written["seconds"]) == list(PARTS)
    # A killed process loses at most 0.02 seconds, and a machine that is busy, some more.
    assert sum(written["seconds"].values()) == pytest.approx(sum(lifetimes), rel=0.01, abs=0.1)
    assert written["seconds"]["repeated steps"] > 0
    total = re.search(r"^Time +(\S+) in (\d) starts: .*; (\S+) at 3600.00 an hour$", said, re.M)
    assert int(total[2]) == 2
    assert float(total[3]) == pytest.approx(sum(lifetimes), rel=0.05)
    assert re.search(rf"^Done: 2 epochs in {total[1]},", said, re.M)
