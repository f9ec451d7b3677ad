"""Workers from their start to their end: who fails first is told, the others end within seconds."""

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.app.launch.players import BEGINNING, ROOT, launch, start
from tests.processes import has_ended, wait_for
from towers.app.launch.supervise import End, by_weight, cause, in_words, lost_worker

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
while not all(Path(f"ready-{i}").exists() for i in range(count)):
    time.sleep(0.01)
"""
NO_RESTART = "--max_restarts=0"
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


def timed(tmp_path, *arguments, **options):
    """What `launch` returns, and its seconds."""
    begun = time.monotonic()
    return (*launch(tmp_path, *arguments, **options), time.monotonic() - begun)


def test_workers_know_who_they_are_and_end_well(tmp_path):
    code, lines, stderr = launch(
        tmp_path, "print('I am', index, 'of', count, *sys.argv[1:])", "--workers=3",
        words=["--x=1", "--", "y"],
    )
    assert (code, stderr) == (0, "")
    said = [f"I am {i} of 3 --x=1 -- y" for i in range(3)]
    assert sorted(lines) == sorted([said[0], f"[worker 1] {said[1]}", f"[worker 2] {said[2]}"])


def test_each_has_a_session_of_its_own_and_reads_nothing(tmp_path):
    text = "note('found', f'{os.getsid(0) == os.getpid()} {sys.stdin.read()!r}')"
    assert launch(tmp_path, text, "--workers=2") == (0, [], "")
    for index in range(2):
        assert (tmp_path / f"found-{index}").read_text() == "True ''\n"


@pytest.mark.parametrize("failure, code, stderr", [
    ("sys.exit(2)", 2, "error: worker 1 ended with exit code 2.\n"),
    ("sys.exit(7)", 7, "error: worker 1 ended with exit code 7.\n"),
    ("print('error: bad.', file=sys.stderr); sys.exit(2)", 2, "error: worker 1: bad.\n"),
])
def test_who_fails_first_gives_the_code_and_the_others_are_asked_to_end(
    failure, code, stderr, tmp_path
):
    found, lines, said, seconds = timed(tmp_path, WAIT + failure, "--workers=3")
    assert (found, said) == (code, stderr)
    assert sorted(lines) == ["[worker 2] ends", "ends"]
    assert seconds < 15


def test_a_traceback_is_whole_and_says_whose_it_is(tmp_path):
    code, _, stderr = launch(tmp_path, WAIT + "1 / 0", "--workers=2")
    first, *_, last = stderr.splitlines()
    assert (code, first) == (1, "[worker 1] Traceback (most recent call last):")
    assert last == "[worker 1] ZeroDivisionError: division by zero"


def test_a_mistake_that_all_have_found_is_shown_once_as_the_chief_says_it(tmp_path):
    text = """
time.sleep(0.3 * (count - index))
print(f"error: --batch_size ({index}) is wrong.", file=sys.stderr)
sys.exit(2)
"""
    assert launch(tmp_path, text, "--workers=3") == (2, [], "error: --batch_size (0) is wrong.\n")


def test_who_has_lost_another_does_not_hide_why_that_one_failed(tmp_path):
    text = """
if index == 1:
    time.sleep(0.5)
    raise KeyError("the cause")
print("error: worker 1 was lost.", file=sys.stderr)
sys.exit(3)
"""
    code, _, stderr = launch(tmp_path, text, "--workers=3")
    assert code == 1 and stderr.endswith("[worker 1] KeyError: 'the cause'\n")
    assert "error:" not in stderr


@pytest.mark.matrix
def test_who_does_not_obey_is_killed(tmp_path):
    text = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note("pid", os.getpid())
time.sleep(0.5 if index == 1 else 60)
sys.exit(1)
"""
    code, _, _, seconds = timed(tmp_path, text, "--workers=3")
    assert code == 1 and 5 < seconds < 25
    for text in wait_for(tmp_path / "pid-0", tmp_path / "pid-2"):
        assert has_ended(int(text), 0.5)


def test_a_worker_that_has_stopped_leaves_the_others_time_to_save(tmp_path):
    text = """
note("ready")
if index == 1:
    print("stopped by SIGTERM", file=sys.stderr)
    sys.exit(143)
while not Path("ready-1").exists():
    time.sleep(0.01)
time.sleep(3)
print("saved")
print("stopped by SIGTERM", file=sys.stderr)
sys.exit(143)
"""
    code, lines, stderr = launch(tmp_path, text, "--workers=2")
    assert (code, lines, stderr) == (143, ["saved"], "[worker 1] stopped by SIGTERM\n")


def test_but_not_for_ever(tmp_path):
    text = """
if index == 0:
    time.sleep(60)
sys.exit(143)
"""
    short = ["from towers.app.launch import supervise", "supervise._SAVE = 0.5"]
    code, *_, seconds = timed(tmp_path, text, "--workers=2", inside=short)
    assert code == 143 and seconds < 25


def test_words_on_stderr_come_at_once_and_what_was_no_failure_after_a_while(tmp_path):
    text = """
import traceback
print("a warning", file=sys.stderr)
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
time.sleep(1)
print("goes on")
"""
    short = ["from towers.app.launch import screen", "screen.HELD_SECONDS = 0.3"]
    code, lines, stderr = launch(tmp_path, text, "--workers=1", inside=short)
    assert (code, lines) == (0, ["goes on"])
    assert stderr.startswith("a warning\nTraceback") and stderr.endswith("by zero\n")


def test_a_worker_that_ends_well_has_all_its_words_shown(tmp_path):
    text = "print('error: but not mine.', file=sys.stderr)"
    assert launch(tmp_path, text, "--workers=1") == (0, [], "error: but not mine.\n")


def test_a_process_that_cannot_be_started_is_one_line(tmp_path):
    few = ["import resource, os", "from towers.app.launch import supervise, worker",
           "start = supervise.Worker",
           "supervise.Worker = lambda i, *a: start(i, *a) if i < 2 else os.open('/none', 0)"]
    code, _, stderr = launch(tmp_path, "note('pid', os.getpid()); time.sleep(60)", "--workers=3",
                             inside=few)
    assert (code, stderr) == (
        2, "error: worker 2 cannot be started: No such file or directory. Use fewer --workers.\n"
    )
    for path in tmp_path.glob("pid-*"):  # who was killed at once has left none
        assert has_ended(int(path.read_text()), 1)


def test_much_output_is_whole(tmp_path):
    text = "for i in range(20_000): print(f'{index} {i}')"
    code, lines, _ = launch(tmp_path, text, "--workers=2")
    assert code == 0
    assert [line for line in lines if not line.startswith("[")] == [f"0 {i}" for i in range(20_000)]
    others = [line for line in lines if line.startswith("[")]
    assert others == [f"[worker 1] 1 {i}" for i in range(20_000)]


@pytest.mark.parametrize("ends, expected", [
    ([End(0, 0), End(1, 0)], None),
    # the first that failed by itself
    ([End(1, 1), End(0, 1)], End(1, 1)),
    ([End(1, -9), End(0, 1)], End(1, -9)),
    ([End(0, 0), End(1, 5)], End(1, 5)),
    # who has lost another explains nothing
    ([End(0, 3), End(1, 1), End(2, 3)], End(1, 1)),
    ([End(0, 3), End(2, 3), End(1, -11)], End(1, -11)),
    # unless nobody else failed, or only when he was asked to end
    ([End(2, 3), End(0, 3)], End(2, 3)),
    ([End(2, 3), End(1, -9, told=True, killed=True)], End(2, 3)),
    ([End(2, 3), End(1, -15, told=True)], End(2, 3)),
    ([End(2, 3), End(1, 1, told=True)], End(1, 1, told=True)),
    # of a mistake that all have found, the chief's words
    ([End(2, 2), End(0, 2), End(1, 143, told=True)], End(0, 2)),
    ([End(2, 2), End(0, 1)], End(2, 2)),
    # one was stopped, and with it all; unless one of them failed
    ([End(1, 143), End(0, 143)], End(1, 143)),
    ([End(1, 129), End(0, 3)], End(1, 129)),
    ([End(1, 130), End(0, 0), End(2, 3)], End(1, 130)),
    ([End(1, 143), End(0, 1)], End(0, 1)),
    # all were stopped by the launcher
    ([End(1, 143, told=True), End(0, -15, told=True)], None),
    ([End(1, 130, told=True), End(0, 3, told=True)], None),
    ([End(1, 130, told=True), End(0, 1, told=True)], End(0, 1, told=True)),
])
def test_the_cause_is_the_first_that_failed_by_itself(ends, expected):
    assert cause(ends) == expected


@pytest.mark.parametrize("ends, why, expected", [
    ([End(1, -9), End(0, 3), End(2, 3)], End(1, -9), 1),
    ([End(0, 3), End(2, 3), End(1, -9, True, True)], End(0, 3), 1),
    ([End(0, 3), End(2, 3), End(1, 143, True)], End(0, 3), 2),
])
def test_the_run_goes_on_without_who_was_lost(ends, why, expected):
    assert lost_worker(ends, why) == expected


@pytest.mark.parametrize("code, expected", [(-9, True), (-11, True), (3, True), (1, False),
                                            (2, False), (0, False), (143, False)])
def test_a_loss_is_a_signal_or_who_missed_one(code, expected):
    assert End(0, code).is_loss is expected


def test_ends_of_one_moment_are_ordered_by_what_they_explain():
    ends = [End(0, 1), End(1, 3), End(2, -9), End(4, 2), End(3, 2)]
    assert [end.worker for end in by_weight(ends)] == [3, 4, 2, 0, 1]


@pytest.mark.parametrize("end, expected", [
    (End(1, -9), "worker 1 was killed by SIGKILL (is there too little memory?)"),
    (End(0, -11), "worker 0 was killed by SIGSEGV"),
    (End(2, 5), "worker 2 ended with exit code 5"),
])
def test_an_end_in_words(end, expected):
    assert in_words(end) == expected


def started(tmp_path, seconds=1.0, text=SAVES, **options):
    """(the launcher, its two workers' ids), once they run."""
    process = start(tmp_path, text.replace("SECONDS", str(seconds)), "--workers=2", **options)
    texts = wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
    return process, [int(text) for text in texts]


@pytest.mark.telling("15-*")
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
from towers.app.launch.__main__ import main
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
    early = ["import os, signal", "from towers.app.launch import launcher",
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
        os.execv(sys.executable, [sys.executable, "-m", "towers.app.launch", "--workers=2", "--",
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
