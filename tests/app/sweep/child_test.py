"""A cell's process: the script as Python itself would run it, and what memory it took."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run_child(tmp_path, text, *flags):
    script = tmp_path / "scripts" / "script.py"
    script.parent.mkdir()
    script.write_text(text)
    (tmp_path / "run").mkdir()
    return subprocess.run(
        [sys.executable, "-m", "towers.app.sweep.child", str(os.getpid()), script, tmp_path / "run",
         *flags],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def test_a_script_runs_as_a_command_of_its_own_and_its_memory_is_measured(tmp_path):
    text = """
import sys
print(__name__, sys.argv[1:], sys.path[0])
taken = b"x" * 300_000_000
sys.exit(0)
"""
    done = run_child(tmp_path, text, "--epochs=3", "--device=cpu")
    assert done.returncode == 0, done.stderr
    run, scripts = tmp_path / "run", tmp_path / "scripts"
    assert done.stdout.splitlines()[0] == (
        f"__main__ ['--run_dir={run}', '--epochs=3', '--device=cpu'] {scripts}"
    )
    measured = json.loads((run / "cell.json").read_text())
    assert 300 < measured["host_memory_mb"] < 20_000
    assert (measured["device_memory_mb"], measured["gpu"]) == (None, None)
    assert measured["cores"] == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("text, code", [("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_a_script_that_fails_is_not_measured(text, code, tmp_path):
    assert run_child(tmp_path, text).returncode == code
    assert os.listdir(tmp_path / "run") == []
