"""The parts that need one process; what needs several is in workers_test.py."""

import pytest

from tests.loop_test import config
from towers import together
from towers.build import build
from towers.machine.cluster import ALONE, Cluster
from towers.saving.run_dir import LOG

CHIEF, OTHER = (Cluster(("a:1", "b:1"), index) for index in (0, 1))


def test_the_chiefs_log_is_the_runs():
    assert [together.log_name(c) for c in (ALONE, CHIEF, OTHER)] == [LOG, LOG, "log-1.txt"]


@pytest.mark.parametrize("name", ["plan", "profile"])
def test_what_looks_at_one_worker_is_refused_for_several(name):
    together.check_config(ALONE, config(**{name: True}))
    together.check_config(OTHER, config())
    with pytest.raises(ValueError, match=f"{name}=True looks at one worker, .* names 2. Unset"):
        together.check_config(CHIEF, config(**{name: True}))


def test_the_other_workers_say_where_their_lines_go_and_nothing_else(capsys):
    out = together.report(OTHER)
    out.line("never seen")
    assert capsys.readouterr().out == (
        "worker 1 of 2, at b:1: its lines go to log-1.txt in the run's directory\n"
    )


def test_who_is_alone_makes_its_directory_and_agrees(tmp_path):
    run = build(config())
    assert together.directory(run, lambda made: tmp_path / str(made.epochs)) == tmp_path / "2"
    together.check_same(run, {"train": "0" * 64})
