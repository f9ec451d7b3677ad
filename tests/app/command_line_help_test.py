"""--help: every flag in one group, the most used flags first."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from towers.app.command_line import GROUPS, MOST_USED, asked_for
from towers.app.config import TrainConfig

ROOT = Path(__file__).parents[2]


def shown(*arguments):
    """The exit code, and the names of the flags in the order in which they are printed."""
    done = subprocess.run([sys.executable, "train.py", *arguments], cwd=ROOT, text=True,
                          capture_output=True, timeout=100)
    lines = [line.removeprefix("  --").removeprefix("[no]").partition(":")[0]
             for line in done.stdout.splitlines() if line.startswith("  --")]
    return done.returncode, lines, done.stderr


def test_help_lists_every_flag_once_and_the_most_used_ones_first():
    code, names, _ = shown("--num_gpus=2", "--help")
    assert code == 0 and set(names[:len(MOST_USED)]) == set(MOST_USED)
    assert len(names) == len(set(names))
    assert set(names) == {field.name for field in dataclasses.fields(TrainConfig)} | {
        "devices", "evaluate", "predict", "out"
    }
    grouped = [name for _, members in GROUPS.values() for name in members]
    assert sorted(grouped) == sorted(names)


def test_help_of_a_group_lists_its_flags_alone():
    code, names, _ = shown("--help=data")
    assert code == 0 and sorted(names) == sorted(GROUPS["data"][1])


def test_a_group_that_there_is_not_is_an_error_with_the_groups():
    code, names, error = shown("--help=everything")
    assert (code, names) == (2, []) and error.count("\n") == 1
    assert "--help (everything)" in error and "model, data, optimization" in error


@pytest.mark.parametrize("words, group", [
    (["--help"], ""), (["-h"], ""), (["--seed=1", "--help=data"], "data"), (["--seed=1"], None),
    (["--helper"], None), ([], None),
])
def test_arguments_that_ask_for_help(words, group):
    assert asked_for(["train.py", *words]) == group
