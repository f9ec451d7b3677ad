"""The run goes on after a worker was lost: with one less, from its last checkpoint."""

import os
import re
import signal

import pytest

from tests.app.launch.players import launch, start, start_command
from tests.processes import wait_for
from tests.resuming import FLAGS, ROOT, outcome, uninterrupted

# Every attempt leaves a line: how many workers, which one, its arguments.
LOG = """
with open("log", "a") as file:
    print(count, index, os.environ.get("CUDA_VISIBLE_DEVICES"), *sys.argv[1:], file=file)
def wait_for_all():
    while len(Path("log").read_text().splitlines()) < sum(range(count, first + 1)):
        time.sleep(0.01)
def miss(who):
    print(f"error: worker {who} was lost.", file=sys.stderr)
    sys.exit(3)
first = int(os.environ.get("FIRST", "3"))
wait_for_all()
"""
KILLED = "was killed by SIGKILL (is there too little memory?)"
# train.py as far as the launcher sees it.
TRAIN = """
directory = next((w.split("=")[1] for w in sys.argv if w.startswith(("--run_dir", "--res"))), None)
directory = directory or "runs/cnn-mnist-001"
if index == 0:
    Path(directory).mkdir(parents=True, exist_ok=True)
    Path(directory, "config.json").touch()
    print(f"towers 0.1 | TensorFlow 2.21, Keras 3.15 | run: {directory}", flush=True)
    note("named")
while not Path("named-0").exists():
    time.sleep(0.01)
"""


def attempts(tmp_path):
    """{workers: the arguments of each}."""
    found = {}
    for line in sorted((tmp_path / "log").read_text().splitlines()):
        count, *_, = line.split()
        found.setdefault(int(count), []).append(line.split()[3:])
    return found


def test_a_script_starts_again_with_the_same_arguments_and_one_worker_less(tmp_path):
    text = LOG + "if index == count - 1 and count > 1: kill_self()\nif count > 1: miss(count - 1)"
    code, lines, stderr = launch(tmp_path, text, "--workers=3", words=["--x=1"])
    assert (code, stderr) == (0, "")
    assert lines == [
        f"Restart   worker 2 {KILLED}: script.py starts again with 2 workers (1 of 3)",
        f"Restart   worker 1 {KILLED}: script.py starts again with 1 worker (2 of 3)",
    ]
    assert attempts(tmp_path) == {3: [["--x=1"]] * 3, 2: [["--x=1"]] * 2, 1: [["--x=1"]]}


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("words, directory", [
    ([], "runs/cnn-mnist-001"), (["--run_dir=mine"], "mine"),
])
def test_train_py_resumes_in_its_directory(lost, words, directory, tmp_path):
    text = LOG + TRAIN + f"if count == 3 and index == {lost}: kill_self()\n" \
        f"if count == 3: miss({lost})"
    code, lines, stderr = launch(
        tmp_path, text, "--workers=3", words=["train.py", "--epochs=3", *words]
    )
    title = f"towers 0.1 | TensorFlow 2.21, Keras 3.15 | run: {directory}"
    assert (code, stderr) == (0, "")
    assert lines == [
        title,
        f"Restart   worker {lost} {KILLED}: train.py --resume={directory} goes on with 2 workers "
        "(1 of 3)",
        title,
    ]
    assert attempts(tmp_path)[2] == [[f"--resume={directory}"]] * 2


def test_a_run_that_was_lost_before_it_began_begins_again(tmp_path):
    text = LOG + "if count == 3 and index == 1: kill_self()\nif count == 3: miss(1)"
    code, lines, _ = launch(tmp_path, text, "--workers=3", words=["train.py", "--run_dir=mine"])
    assert (code, len(lines)) == (0, 1)
    assert "train.py starts again with 2 workers" in lines[0]
    assert attempts(tmp_path)[2] == [["--run_dir=mine"]] * 2


@pytest.mark.matrix
def test_a_worker_that_no_longer_answers_is_lost(tmp_path):
    text = LOG + """
if count == 3 and index == 1:
    kill_self(signal.SIGSTOP)
if count == 3:
    time.sleep(0.2)
    print("error: worker 1 has not answered for 60 s, in the exchange of gradients.",
          file=sys.stderr)
    sys.exit(3)
"""
    code, lines, stderr = launch(
        tmp_path, text, "--workers=3", "--gpus_per_worker=1",
        environment={"CUDA_VISIBLE_DEVICES": "4,5,6"},
    )
    assert (code, stderr) == (0, "")
    assert lines == [
        "Restart   worker 1 has not answered for 60 s, in the exchange of gradients: script.py "
        "starts again with 2 workers (1 of 3)"
    ]
    assert gpus(tmp_path, 2) == ["4", "6"]


@pytest.mark.matrix
def test_a_worker_that_hangs_is_named_by_the_launcher_which_killed_it(tmp_path):
    text = LOG + """
if count == 3 and index == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("ready")
    time.sleep(1000)
if count == 3:
    while not Path("ready-1").exists():
        time.sleep(0.01)
    print("error: not all of them came to the end of a step.", file=sys.stderr)
    sys.exit(3)
"""
    code, lines, _ = launch(tmp_path, text, "--workers=3")
    assert (code, lines) == (0, [
        "Restart   not all of them came to the end of a step; worker 1 did not end and was killed: "
        "script.py starts again with 2 workers (1 of 3)"
    ])


def gpus(tmp_path, num_workers):
    """The workers' CUDA_VISIBLE_DEVICES, in the attempt of so many."""
    lines = sorted((tmp_path / "log").read_text().splitlines())
    return [line.split()[2] for line in lines if line.startswith(f"{num_workers} ")]


def test_the_workers_that_are_left_keep_their_gpus(tmp_path):
    text = LOG + "if count == 3 and index == 0: kill_self()\nif count == 3: miss(0)"
    code, *_ = launch(
        tmp_path, text, "--workers=3", "--gpus_per_worker=2",
        environment={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
    )
    assert code == 0
    assert (gpus(tmp_path, 3), gpus(tmp_path, 2)) == (["0,1", "2,3", "4,5"], ["2,3", "4,5"])


def test_a_single_worker_starts_again_alone_as_often_as_it_may(tmp_path):
    text = "print('begins', flush=True)\nkill_self(signal.SIGSEGV)"
    code, lines, stderr = launch(tmp_path, text, "--workers=1", "--max_restarts=2")
    again = "Restart   worker 0 was killed by SIGSEGV: script.py starts again with 1 worker "
    assert lines == ["begins", again + "(1 of 2)", "begins", again + "(2 of 2)", "begins"]
    assert (code, stderr) == (1, "error: worker 0 was killed by SIGSEGV after 2 restarts.\n")


@pytest.mark.parametrize("flags", [("--workers=2",), ("--workers=2", "--gpus_per_worker=4")])
def test_without_restarts_it_says_how_to_go_on(flags, tmp_path):
    text = TRAIN + "if index == 1: kill_self()\nsys.exit(3)"
    code, _, stderr = launch(
        tmp_path, text, *flags, "--max_restarts=0", words=["train.py", "--epochs=3"],
        environment={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
    )
    assert code == 1
    assert stderr == (
        f"error: worker 1 {KILLED}. It goes on with: python -m towers.launch {' '.join(flags)} -- "
        "train.py --resume=runs/cnn-mnist-001\n"
    )


def test_what_a_crash_has_left_is_shown(tmp_path):
    text = "import faulthandler\nfaulthandler.enable()\nkill_self(signal.SIGABRT)"
    code, _, stderr = launch(tmp_path, text, "--workers=1", "--max_restarts=0")
    assert code == 1 and stderr.startswith("Fatal Python error: Aborted")
    assert stderr.endswith("error: worker 0 was killed by SIGABRT.\n")


@pytest.mark.parametrize("end, code", [("sys.exit(2)", 2), ("1 / 0", 1), ("sys.exit(143)", 143)])
def test_a_failure_that_would_come_again_is_not_tried_again(end, code, tmp_path):
    found, lines, _ = launch(tmp_path, f"print('begins')\n{end}", "--workers=1")
    assert (found, lines) == (code, ["begins"])


def test_no_restart_once_the_launcher_was_stopped(tmp_path):
    text = "note('pid', os.getpid())\nsignal.signal(signal.SIGINT, lambda *_: note('got'))\n" \
        "while True: time.sleep(1)"
    process = start(tmp_path, text, "--workers=2")
    pids = [int(text) for text in wait_for(tmp_path / "pid-0", tmp_path / "pid-1")]
    os.kill(pids[1], signal.SIGKILL)
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "got-0")
    os.kill(pids[0], signal.SIGKILL)
    assert process.communicate(timeout=30) == ("", "stopped by Ctrl-C\n")
    assert process.returncode == 130


def test_every_attempt_has_addresses_of_its_own(tmp_path):
    text = LOG + """
with open("addresses", "a") as file:
    print(*config["cluster"]["worker"], file=file)
if count == 3 and index == 1: kill_self()
if count == 3: miss(1)
"""
    assert launch(tmp_path, text, "--workers=3")[0] == 0
    lines = set((tmp_path / "addresses").read_text().splitlines())
    assert sorted(len(line.split()) for line in lines) == [2, 3]
    assert all(a.startswith("127.0.0.1:") for line in lines for a in line.split())


# A model whose process is killed at the first checkpoint after step 0, once.
KILLING = """
import os, threading, time
from pathlib import Path
from tests.resuming import model as plain

def watch():
    while not list(Path("run/checkpoints").glob("epoch-*-step-[2-6]")):
        time.sleep(0.001)
    Path("killed").touch()
    os.kill(os.getpid(), 9)

def model(input_shape, num_classes):
    if not Path("killed").exists():
        threading.Thread(target=watch, daemon=True).start()
    return plain(input_shape, num_classes)
"""


@pytest.mark.matrix
def test_train_py_itself_goes_on_to_the_same_bits(tmp_path):
    (tmp_path / "killing.py").write_text(KILLING)
    process = start_command(
        tmp_path, "--workers=1", "--", str(ROOT / "train.py"), *FLAGS, "--model=killing:model",
        "--checkpoint_every=2",
    )
    stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stderr) == (0, "")
    again = f"Restart   worker 0 {KILLED}: train.py --resume=run goes on with 1 worker (1 of 3)"
    assert stdout.splitlines().count(again) == 1
    assert re.search("^Resume    from step [2-6]:", stdout, re.MULTILINE), stdout
    assert outcome(tmp_path / "run") == uninterrupted(*FLAGS)
