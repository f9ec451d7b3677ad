"""Ctrl-C, SIGTERM and SIGHUP in the launcher; and its own death."""

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.players import BEGINNING, ROOT, start
from tests.processes import has_ended, wait_for

# Saves for SECONDS, like train.py: a second signal ends it in the middle of that.
SAVES = """
def save(number, frame):
    signal.signal(number, lambda *_: os._exit(128 + number))
    note("got", number)
    time.sleep(SECONDS)
    note("saved")
    print("saved", flush=True)
    print("stopped by it", file=sys.stderr)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGHUP, save)
note("pid", os.getpid())
time.sleep(60)
"""


def started(tmp_path, seconds=1.0, text=SAVES, **options):
    """(the launcher, its two workers' ids), once they run."""
    process = start(tmp_path, text.replace("SECONDS", str(seconds)), "--workers=2", **options)
    texts = wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    return process, [int(text) for text in texts]


@pytest.mark.parametrize("number, code, stderr", [
    (signal.SIGINT, 130, "stopped by Ctrl-C\n"), (signal.SIGTERM, 143, "stopped by SIGTERM\n"),
    (signal.SIGHUP, 129, "stopped by SIGHUP\n"),
])
def test_a_signal_is_passed_on_once_and_the_save_waited_for(number, code, stderr, tmp_path):
    process, _ = started(tmp_path, 2.0)
    process.send_signal(number)
    stdout, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (code, stderr)
    assert sorted(stdout.splitlines()) == ["[worker 1] saved", "saved"]
    assert wait_for(tmp_path / "got-0", tmp_path / "got-1") == [f"{number.value}\n"] * 2


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills(second, tmp_path):
    process, workers = started(tmp_path, 60.0)
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "got-0", tmp_path / "got-1")
    begun = time.monotonic()
    process.send_signal(second)
    process.communicate(timeout=30)
    assert process.returncode == 130 and time.monotonic() - begun < 15
    assert all(has_ended(pid, 0.5) for pid in workers)


def test_a_terminals_ctrl_c_reaches_the_workers_once(tmp_path):
    """As a signal to all of the terminal's foreground processes, of which they are none."""
    (tmp_path / "run.py").write_text(f"""
import os, sys
os.setsid()
sys.argv[1:1] = ["--workers=2", "--", "script.py"]
sys.path.insert(0, {str(ROOT)!r})
from towers.launch.__main__ import main
sys.exit(main(sys.argv))
""")
    (tmp_path / "script.py").write_text(BEGINNING + SAVES.replace("SECONDS", "0.5"))
    process = subprocess.Popen(
        [sys.executable, "run.py"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "stopped by Ctrl-C\n")
    wait_for(tmp_path / "saved-0", tmp_path / "saved-1")


def test_scripts_without_a_handler_are_stopped_and_not_lost(tmp_path):
    process, _ = started(tmp_path, text="note('pid', os.getpid()); time.sleep(60)")
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (143, "", "stopped by SIGTERM\n")


def test_a_keyboard_interrupt_is_no_traceback(tmp_path):
    process, _ = started(tmp_path, text="note('pid', os.getpid()); time.sleep(60)")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (130, "", "stopped by Ctrl-C\n")


def test_workers_that_end_well_all_the_same_end_well(tmp_path):
    text = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nnote('pid', os.getpid())\n" \
        "time.sleep(60)"
    process, _ = started(tmp_path, text=text)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0


def test_a_save_that_fails_is_told(tmp_path):
    text = SAVES.replace("sys.exit(128 + number)", "sys.exit(1) if index == 0 else os._exit(143)")
    process, _ = started(tmp_path, 0.1, text.replace("stopped by it", "error: the disk is full."))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (1, "error: the disk is full.\n")


def test_a_signal_before_the_workers_is_passed_on_to_them(tmp_path):
    early = ["import os, signal", "from towers.launch import launcher",
             "supervise = launcher.supervise",
             "launcher.supervise = lambda *a: "
             "(signal.raise_signal(signal.SIGTERM), supervise(*a))[1]"]
    process = start(tmp_path, "time.sleep(60)", "--workers=2", inside=early)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (143, "stopped by SIGTERM\n")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone knows prctl")
def test_workers_end_with_a_launcher_that_is_killed(tmp_path):
    process, workers = started(tmp_path)
    process.send_signal(signal.SIGKILL)
    assert all(has_ended(pid) for pid in workers)
    process.communicate()
    assert not list(tmp_path.glob("got-*"))


def test_on_a_terminal_ctrl_c_is_pressed(tmp_path):
    """The real thing: a terminal whose driver makes the signal of the key."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ.update(PYTHONPATH=str(ROOT), TERM="xterm")
        os.execv(sys.executable, [sys.executable, "-m", "towers.launch", "--workers=2", "--",
                                  "script.py"])
    (tmp_path / "script.py.new").write_text(BEGINNING + SAVES.replace("SECONDS", "0.5"))
    os.replace(tmp_path / "script.py.new", tmp_path / "script.py")
    wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    os.write(terminal, b"\x03")
    shown = b""
    try:
        while data := os.read(terminal, 1000):
            shown += data
    except OSError:
        pass  # its last process has ended
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    # A line of the chief's that the other's came into was erased, and is shown again below it.
    lines = re.sub(rb"[^\n]*\r\x1b\[2K", b"", shown.replace(b"^C", b"")).splitlines()
    assert sorted(lines[:2]) == [b"[worker 1] saved", b"saved"]
    assert lines[2:] == [b"stopped by Ctrl-C"]
