"""Workers from their start to their end: who fails first is told, the others end within seconds."""

import time

import pytest

from tests.launch.players import launch
from tests.processes import has_ended, wait_for
from towers.launch.supervise import End, by_weight, cause, in_words, lost_worker

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
    short = ["from towers.launch import supervise", "supervise._SAVE = 0.5"]
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
    short = ["from towers.launch import screen", "screen.HELD_SECONDS = 0.3"]
    code, lines, stderr = launch(tmp_path, text, "--workers=1", inside=short)
    assert (code, lines) == (0, ["goes on"])
    assert stderr.startswith("a warning\nTraceback") and stderr.endswith("by zero\n")


def test_a_worker_that_ends_well_has_all_its_words_shown(tmp_path):
    text = "print('error: but not mine.', file=sys.stderr)"
    assert launch(tmp_path, text, "--workers=1") == (0, [], "error: but not mine.\n")


def test_a_process_that_cannot_be_started_is_one_line(tmp_path):
    few = ["import resource, os", "from towers.launch import supervise, worker",
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
