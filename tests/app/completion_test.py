"""--completion: bash completes each flag, the words of a choice, and files."""

import dataclasses
import subprocess

import pytest

from tests import processes
from towers.app.config import TrainConfig

ASK = """
eval "$0"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_complete_train.py
echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script():
    return processes.run("train.py", "--completion").stdout


def completed(script, *words):
    """What bash, which splits words at "=", offers for the last of these words."""
    ask = ["bash", "-c", ASK, script, "train.py", *words]
    return subprocess.run(ask, text=True, capture_output=True, check=True).stdout.split()


@pytest.mark.parametrize(
    "words, offered",
    [
        (["--keep_"], ["--keep_checkpoints", "--keep_best"]),
        (["--seed", "7", "--monitor"], ["--monitor", "--monitor_mode"]),
        (["--device", ""], ["auto", "gpu", "cpu"]),
        (["--device", "=", "g"], ["gpu"]),
        (["--run_dir", "="], []),  # bash then completes files
        (["--zzz"], []),
    ],
)
def test_bash_is_offered_flags_and_words(script, words, offered):
    assert completed(script, *words) == offered


def test_every_flag_is_offered(script):
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert names <= {word[2:] for word in completed(script, "--")}
    assert script.rstrip("\n").endswith("complete -o default -F _complete_train.py train.py")
