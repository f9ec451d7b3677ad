"""What libraries write to stderr, and what reaches the terminal; no TensorFlow in sight."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

NOISY = """
import logging, os, pathlib, sys, warnings
from towers.machine import terminal
with terminal.quiet_stderr() as captured:
    os.write(2, b"C++ before\\n")
    logging.getLogger("tensorflow").warning("logged")
    LINE
    os.write(2, b"C++ after\\n")
    warnings.warn("old")
    print("for the user", file=sys.stderr)
os.write(2, b"at the end\\n")
"""


def run_noisy(line, cwd):
    return subprocess.run(
        [sys.executable, "-c", NOISY.replace("LINE", line)], cwd=cwd,
        env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )


def test_messages_go_to_the_log_in_order_and_pythons_stderr_to_the_terminal(tmp_path):
    (tmp_path / "log.txt").write_text("first\n")
    done = run_noisy("captured.move_to(pathlib.Path('log.txt'))", tmp_path)
    assert (done.stderr, done.returncode) == ("for the user\nat the end\n", 0)
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert log[:4] == ["first", "C++ before", "WARNING:tensorflow: logged", "C++ after"]
    assert "UserWarning: old" in log[4]


def test_messages_without_a_log_are_dropped(tmp_path):
    done = run_noisy("pass", tmp_path)
    assert (done.stderr, done.returncode) == ("for the user\nat the end\n", 0)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_reaches_the_terminal(tmp_path):
    done = run_noisy("raise RuntimeError('own')", tmp_path)
    assert done.stderr.splitlines()[-1] == "RuntimeError: own"
    assert "C++ before" not in done.stderr


def test_a_crash_says_where_it_was(tmp_path):
    done = run_noisy("os.abort()", tmp_path)
    assert done.stderr.startswith("Fatal Python error: Aborted")
    assert done.returncode < 0
