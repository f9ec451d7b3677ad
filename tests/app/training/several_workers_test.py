"""The parts that need one process; what needs several is in workers_test.py."""

from pathlib import Path

import pytest

from tests.app.run_test import config
from towers.resume.run_dir import LOG
from towers.workers.cluster import ALONE, Cluster
from towers.app.reporting.report import report_of
from towers.app.training import several_workers
from towers.app.training.build import build

CHIEF, OTHER = (Cluster(("a:1", "b:1"), index) for index in (0, 1))


def test_the_chiefs_log_is_the_runs():
    assert [several_workers.log_name(c) for c in (ALONE, CHIEF, OTHER)] == [LOG, LOG, "log-1.txt"]


def test_what_works_with_one_worker_is_refused_for_several():
    several_workers.check_alone(ALONE, "plan=True")
    with pytest.raises(ValueError, match="^plan=True works with one worker, .* names 2. Unset"):
        several_workers.check_alone(CHIEF, "plan=True")


def test_the_other_workers_say_where_their_lines_go_and_nothing_else(capsys):
    out = report_of(OTHER)
    out.line("never seen")
    assert capsys.readouterr().out == (
        "worker 1 of 2, at b:1: its lines go to log-1.txt in the run's directory\n"
    )


def test_who_is_alone_makes_its_directory_and_agrees(tmp_path):
    run = build(config())
    assert several_workers.shared_directory(run, Path("a"), tmp_path) == tmp_path / "a"
    assert list(several_workers.check_same(run)) == ["train", "test"]
