"""Workers from their start to the end of the last: lines, failures and signals."""

import os
import pty
import signal
import sys
import time

import pytest

from tests.app.launch.players import BEGINNING, launch, start
from tests.processes import has_ended, wait_for

# Waits for a SIGTERM, which it obeys like train.py.
WAIT = """
def end(number, frame):
    print("ends", flush=True)
    print("stopped by SIGTERM", file=sys.stderr)
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
note("ready")
if index != 1:
    time.sleep(30)
wait_for(*[f"ready-{i}" for i in range(count)])
"""
# Saves for SECONDS, like train.py: a second signal ends it in the middle of that.
SAVES = """
def save(number, frame):
    signal.signal(number, lambda *_: os._exit(128 + number))
    note("got", number)
    time.sleep(SECONDS)
    print("saved", flush=True)
    print("stopped by it", file=sys.stderr)
    sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, save)
note("pid", os.getpid())
time.sleep(60)
"""
SLEEPS = "note('pid', os.getpid())\ntime.sleep(60)"


def test_each_worker_knows_its_index_has_a_session_and_reads_nothing(tmp_path):
    text = "print(index, count, os.getsid(0) == os.getpid(), repr(sys.stdin.read()), *sys.argv[1:])"
    code, lines, stderr = launch(tmp_path, text, "--workers=3", words=["--x=1", "--", "y"])
    said = [f"{i} 3 True '' --x=1 -- y" for i in range(3)]
    assert (code, stderr) == (0, "")
    assert sorted(lines) == sorted([said[0], f"[worker 1] {said[1]}", f"[worker 2] {said[2]}"])


def test_lines_come_when_they_are_printed(tmp_path):
    process = start(tmp_path, "print('now')\ntime.sleep(60)", "--workers=1")
    assert process.stdout.readline() == "now\n"
    process.terminate()
    assert process.communicate(timeout=30) == ("", "stopped by SIGTERM\n")


def test_all_output_is_shown_in_order_and_of_a_bar_its_last_state(tmp_path):
    text = "for i in range(5_000): print(f'{index} {i}')\nprint('1/2\\r2/2\\nno end', end='')"
    code, lines, _ = launch(tmp_path, text, "--workers=2")
    assert code == 0
    for index, prefix in enumerate(("", "[worker 1] ")):
        own = [line for line in lines if line.startswith("[") == bool(prefix)]
        expected = [*(f"{index} {i}" for i in range(5_000)), "2/2", "no end"]
        assert own == [f"{prefix}{text}" for text in expected]


def test_a_process_that_holds_the_output_open_is_not_waited_for(tmp_path):
    text = (
        "import subprocess\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(40)'])\nprint('done')"
    )
    begun = time.monotonic()
    process = start(tmp_path, text, "--workers=1")
    assert process.stdout.readline() == "done\n"
    assert process.wait(timeout=30) == 0 and time.monotonic() - begun < 20


@pytest.mark.parametrize(
    "failure, code, stderr",
    [
        ("sys.exit(7)", 7, "error: worker 1 ended with exit code 7.\n"),
        (
            "print('w', file=sys.stderr); print('error: bad.', file=sys.stderr); sys.exit(2)",
            2,
            "error: worker 1 ended with exit code 2: bad.\n",
        ),
    ],
)
def test_the_first_failure_is_shown_last_and_ends_the_others(failure, code, stderr, tmp_path):
    begun = time.monotonic()
    found, lines, said = launch(tmp_path, WAIT + failure, "--workers=3")
    assert found == code and said.endswith(f"\n{stderr}")
    assert sorted(lines) == ["[worker 2] ends", "ends"]
    assert time.monotonic() - begun < 15


def test_a_worker_that_misses_another_does_not_hide_why_that_one_failed(tmp_path):
    text = """
if index == 1:
    time.sleep(0.5)
    raise KeyError("the cause")
print("error: worker 1 was lost.", file=sys.stderr)
sys.exit(3)
"""
    code, lines, stderr = launch(tmp_path, text, "--workers=3")
    assert (code, lines) == (1, []) and "[worker 1] KeyError: 'the cause'\n" in stderr
    assert stderr.endswith("\nerror: worker 1 ended with exit code 1.\n")


@pytest.mark.matrix
def test_a_worker_that_does_not_obey_is_killed_with_all_that_it_has_started(tmp_path):
    text = """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
note("pid", child.pid)
time.sleep(0.5 if index == 1 else 60)
sys.exit(1)
"""
    begun = time.monotonic()
    code, *_ = launch(tmp_path, text, "--workers=2")
    assert code == 1 and 5 < time.monotonic() - begun < 25
    assert has_ended(int(wait_for(tmp_path / "pid-0")[0]), 0.5)


def test_a_worker_that_has_stopped_leaves_the_others_time_to_save(tmp_path):
    text = """
note("ready")
if index == 0:
    wait_for("ready-1")
    time.sleep(1.5)
    print("saved")
print("stopped by SIGTERM", file=sys.stderr)
sys.exit(143)
"""
    code, lines, stderr = launch(tmp_path, text, "--workers=2")
    assert (code, lines) == (143, ["saved"])
    assert stderr.endswith("error: worker 1 ended with exit code 143.\n")


def started(tmp_path, text, seconds=1.0):
    """(the launcher, its two workers' ids), once they run."""
    process = start(tmp_path, text.replace("SECONDS", str(seconds)), "--workers=2")
    texts = wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    return process, [int(text) for text in texts]


@pytest.mark.telling("15-*")
@pytest.mark.parametrize(
    "number, code, stderr",
    [
        (signal.SIGINT, 130, "stopped by Ctrl-C\n"),
        (signal.SIGTERM, 143, "stopped by SIGTERM\n"),
        (signal.SIGHUP, 129, "stopped by SIGHUP\n"),
    ],
)
def test_a_signal_is_passed_on_once_and_the_save_waited_for(number, code, stderr, tmp_path):
    process, _ = started(tmp_path, SAVES, 0.5)
    process.send_signal(number)
    stdout, said = process.communicate(timeout=30)
    assert process.returncode == code and said.endswith(f"stopped by it\n{stderr}")
    assert sorted(stdout.splitlines()) == ["[worker 1] saved", "saved"]
    assert wait_for(tmp_path / "got-0", tmp_path / "got-1") == [f"{number.value}\n"] * 2


def test_a_second_signal_kills(tmp_path):
    process, workers = started(tmp_path, SAVES, 60.0)
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "got-0", tmp_path / "got-1")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 130 and all(has_ended(pid, 0.5) for pid in workers)


@pytest.mark.parametrize(
    "text, code, stderr",
    [
        (SLEEPS, 143, "stopped by SIGTERM\n"),
        (f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n{SLEEPS}", 0, ""),
        (
            SAVES.replace("sys.exit(128 + number)", "os._exit(143 if index else 1)").replace(
                "stopped by it", "error: the disk is full."
            ),
            1,
            "error: worker 0 ended with exit code 1: the disk is full.\n",
        ),
    ],
    ids=["no_handler", "ends_well", "save_fails"],
)
def test_a_signal_gives_the_code_of_the_stop_unless_the_workers_end_otherwise(
    text, code, stderr, tmp_path
):
    process, _ = started(tmp_path, text, 0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code and said.endswith(stderr)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone knows prctl")
def test_workers_end_with_a_launcher_that_is_killed(tmp_path):
    process, workers = started(tmp_path, SAVES)
    process.send_signal(signal.SIGKILL)
    assert all(has_ended(pid) for pid in workers)
    process.communicate()
    assert not list(tmp_path.glob("got-*"))


def test_ctrl_c_on_a_terminal_reaches_each_worker_once(tmp_path):
    """The real thing: a terminal whose driver makes the signal of the key."""
    (tmp_path / "script.py").write_text(BEGINNING + SAVES.replace("SECONDS", "0.5"))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(
            sys.executable,
            [sys.executable, "-m", "towers.launch", "--workers=2", "--", "script.py"],
        )
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
    *lines, last = shown.replace(b"^C", b"").splitlines()
    own = [b"saved", b"stopped by it"]
    assert sorted(lines) == [*(b"[worker 1] " + line for line in own), *own]
    assert last == b"stopped by Ctrl-C"
