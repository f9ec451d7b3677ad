"""python -m towers.launch; each worker's GPUs and addresses; the run goes on after a loss."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.app.launch.players import launch, start, start_command
from tests.processes import wait_for
from towers.app.launch import launcher
from towers.app.launch.launcher import again, cause, free_addresses, gpu_shares, loss
from towers.app.launch.supervise import End
from towers.machine import nvidia


def command(tmp_path, *arguments):
    """(exit code, stdout, stderr)."""
    process = start_command(tmp_path, *arguments)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--", "fit.py"], ["--workers is missing", "--workers=2"]),
        (
            ["--workers=2", "--min_workers=3", "--", "fit.py"],
            ["--min_workers (3)", "--workers (2)"],
        ),
        (["--workers=2", "--", "fti.py"], ["'fti.py' is no file in ", "-- train.py"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, named, tmp_path):
    (tmp_path / "fit.py").write_text("1 / 0")
    code, stdout, stderr = command(tmp_path, *arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert all(name in stderr for name in named), stderr


@pytest.mark.parametrize("start", [["fit.py"], ["-m", "fit"], ["python3", "fit.py"]])
def test_the_scripts_flags_are_not_the_launchers(start, tmp_path):
    (tmp_path / "fit.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert command(tmp_path, "--workers=1", "--", *start, "--workers=9", "--help", "--") == (
        0,
        "__main__ ['--workers=9', '--help', '--']\n",
        "",
    )


@pytest.mark.parametrize("redirection", ["| head -1", ">&- 2>&-", "> /dev/full"])
def test_nobody_who_has_stopped_reading_ends_the_run(redirection, tmp_path):
    (tmp_path / "fit.py").write_text(
        "import time\nfrom pathlib import Path\nfor i in range(5):\n    print(i)\n"
        "    time.sleep(0.1)\nPath('done').touch()"
    )
    typed = (
        f"{sys.executable} -m towers.launch --workers=1 -- fit.py {redirection}; "
        "echo ${PIPESTATUS[0]} > code"
    )
    subprocess.run(
        ["bash", "-c", typed],
        cwd=tmp_path,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
    assert (tmp_path / "done").exists()
    assert (tmp_path / "code").read_text() == "0\n"


KILLED = "was killed by SIGKILL (is there too little memory?)"
# Every attempt leaves a line: how many workers, which one, its GPUs, its arguments.
LOG = """
with open("log", "a") as file:
    print(count, index, os.environ.get("CUDA_VISIBLE_DEVICES"), *sys.argv[1:], file=file)
while len(Path("log").read_text().splitlines()) < sum(range(count, 4)):
    time.sleep(0.01)
def miss(who):
    print(f"error: worker {who} was lost.", file=sys.stderr)
    sys.exit(3)
"""
RUN = "runs/cnn-mnist-001"
TITLE = f"towers 0.1 | TensorFlow 2.21, Keras 3.15 | run: {RUN}"
# train.py as far as the launcher sees it.
TRAIN = f"""
if index == 0:
    Path("{RUN}").mkdir(parents=True, exist_ok=True)
    Path("{RUN}", "config.json").write_text("{{}}")
    print("{TITLE}", flush=True)
    note("named")
wait_for("named-0")
"""


def attempts(tmp_path):
    """{workers: [GPUs and arguments of each]}."""
    found = {}
    for line in sorted((tmp_path / "log").read_text().splitlines()):
        count, _, *rest = line.split()
        found.setdefault(int(count), []).append(rest)
    return found


def test_a_script_starts_again_with_the_same_arguments_and_one_worker_less(tmp_path):
    text = LOG + "if index == count - 1 and count > 1: kill_self()\nif count > 1: miss(count - 1)"
    code, lines, _ = launch(tmp_path, text, "--workers=3", words=["--x=1"])
    assert code == 0
    assert lines == [
        f"Restart   worker 2 {KILLED}: script.py --x=1 continues with 2 workers (1 of 3)",
        f"Restart   worker 1 {KILLED}: script.py --x=1 continues with 1 worker (2 of 3)",
    ]
    assert attempts(tmp_path) == {n: [["None", "--x=1"]] * n for n in (3, 2, 1)}


def test_train_py_resumes_and_the_workers_that_are_left_keep_their_gpus(tmp_path):
    text = LOG + TRAIN + "if count == 3 and index == 0: kill_self()\nif count == 3: miss(0)"
    code, lines, _ = launch(
        tmp_path,
        text,
        "--workers=3",
        "--gpus_per_worker=2",
        words=["train.py", "--epochs=3"],
        environment={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
    )
    restart = f"worker 0 {KILLED}: train.py --resume={RUN} continues with 2 workers (1 of 3)"
    assert code == 0
    assert lines == [TITLE, f"Restart   {restart}", TITLE]
    assert attempts(tmp_path)[2] == [[gpus, f"--resume={RUN}"] for gpus in ("2,3", "4,5")]


@pytest.mark.parametrize(
    "flags, gpus, few",
    [
        (["--rejoin_after=0.01"], ["4 5 6", "4 6", "4 5"], False),  # a round takes longer than that
        (["--min_workers=2"], ["4 5 6", "4 6"], True),
    ],
)
def test_a_lost_worker_joins_the_first_restart_after_its_time(flags, gpus, few, tmp_path):
    """GPU 5 is lost in the first round, GPU 6 in the second one; the third one ends well."""
    text = """
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
before = len(list(Path().glob("*.over")))
Path(f"{before}.{gpu}").touch()
while len(list(Path().glob(f"{before}.*"))) < count:
    time.sleep(0.01)
if before < 2 and gpu != "56"[before]:
    time.sleep(10)
if before < 2:
    Path(f"{before}.over").touch()
    kill_self()
"""
    code, _, stderr = launch(
        tmp_path,
        text,
        "--workers=3",
        "--gpus_per_worker=1",
        *flags,
        environment={"CUDA_VISIBLE_DEVICES": "4,5,6"},
    )
    rounds = [sorted(tmp_path.glob(f"{index}.[456]")) for index in range(len(gpus))]
    assert [" ".join(path.suffix[1:] for path in found) for found in rounds] == gpus
    assert code == (3 if few else 0)
    assert stderr == (
        f"error: worker 1 {KILLED}, and --min_workers (2) is more than the 1 left. "
        "To continue, give the launcher behind --: script.py\n"
        if few
        else ""
    )


@pytest.mark.matrix
def test_a_worker_that_no_longer_answers_is_killed_and_named(tmp_path):
    text = (
        LOG
        + """
if count == 3 and index == 1:
    kill_self(signal.SIGSTOP)
if count == 3:
    time.sleep(0.2)
    print("error: not all of them came to the end of a step.", file=sys.stderr)
    sys.exit(3)
"""
    )
    code, lines, stderr = launch(
        tmp_path,
        text,
        "--workers=3",
        "--gpus_per_worker=1",
        environment={"CUDA_VISIBLE_DEVICES": "4,5,6"},
    )
    said = "error: not all of them came to the end of a step.\n"  # of workers 0 and 2, one by name
    assert (code, stderr.count(said)) == (0, 2)
    assert lines == [
        "Restart   not all of them came to the end of a step; worker 1 did not end and was killed: "
        "script.py continues with 2 workers (1 of 3)"
    ]
    assert [gpus for (gpus,) in attempts(tmp_path)[2]] == ["4", "6"]


def test_a_worker_alone_starts_again_as_often_as_it_may(tmp_path):
    text = (
        "import faulthandler\nfaulthandler.enable()\n"
        "print('begins', flush=True)\nkill_self(signal.SIGABRT)"
    )
    code, lines, stderr = launch(tmp_path, text, "--workers=1", "--max_restarts=2")
    restart = "Restart   worker 0 was killed by SIGABRT: script.py continues with 1 worker "
    assert lines == ["begins", restart + "(1 of 2)", "begins", restart + "(2 of 2)", "begins"]
    assert code == 1 and stderr.startswith("Fatal Python error: Aborted")
    assert stderr.splitlines()[-1] == (
        "error: worker 0 was killed by SIGABRT, after 2 restarts. To continue, give the launcher "
        "behind --: script.py"
    )


def test_a_failure_that_would_come_again_is_not_tried_again(tmp_path):
    code, lines, _ = launch(tmp_path, "print('begins')\n1 / 0", "--workers=1")
    assert (code, lines) == (1, ["begins"])


def test_the_launcher_does_not_restart_once_it_was_stopped(tmp_path):
    text = (
        "note('pid', os.getpid())\nsignal.signal(signal.SIGINT, lambda *_: note('got'))\n"
        "while True: time.sleep(1)"
    )
    process = start(tmp_path, text, "--workers=2")
    pids = [int(text) for text in wait_for(tmp_path / "pid-0", tmp_path / "pid-1")]
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "got-0", tmp_path / "got-1")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert process.communicate(timeout=30) == ("", "stopped by Ctrl-C\n")
    assert process.returncode == 130


@pytest.mark.parametrize(
    "ends, expected",
    [
        ([End(0, 0), End(1, 5)], End(1, 5)),
        ([End(1, 1), End(0, 1)], End(1, 1)),  # the first that failed by itself
        ([End(2, 1), End(1, 2), End(0, 2)], End(0, 2)),  # a mistake: the chief's words
        ([End(0, 3), End(1, 1), End(2, 3)], End(1, 1)),  # a worker that misses another comes last
        ([End(2, 3), End(1, -9, was_asked=True, was_killed=True)], End(2, 3)),
        ([End(1, 143), End(0, 3)], End(1, 143)),
        ([End(1, 143, was_asked=True), End(0, -15, was_asked=True)], None),
        ([End(1, 130, was_asked=True), End(0, 1, was_asked=True)], End(0, 1, was_asked=True)),
    ],
)
def test_the_cause_is_the_end_that_explains_the_others(ends, expected):
    assert cause(ends) == expected


@pytest.mark.parametrize(
    "ends, expected",
    [
        ([End(1, -9), End(0, 3), End(2, 3)], 1),
        ([End(0, 3), End(2, 3), End(1, -9, True, True)], 1),
        ([End(0, 3), End(2, 3), End(1, 143, True)], 2),
    ],
)
def test_the_run_goes_on_without_the_worker_that_was_lost(ends, expected):
    assert loss(ends, cause(ends))[0] == expected


@pytest.mark.parametrize(
    "words, announced, expected",
    [
        (["train.py", "--epochs=3"], "run", ["train.py", "--resume=run"]),
        (["towers-train", "-run_dir", "run"], "run", ["towers-train", "--resume=run"]),
        # the command stays as it is if there is no run yet, if it resumes already, or is no train.py
        (["train.py", "--epochs=3"], None, None),
        (["train.py", "--resume=run", "--epochs=9"], "run", None),
        (["-m", "package.train", "--run_dir=run"], "run", None),
        # the modules of a run that this command began are those that it named
        (["train.py"], "named", ["train.py", "--resume=named", "--trust_run_dir"]),
    ],
)
def test_after_a_loss_train_py_resumes_and_others_start_again(
    words, announced, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "named"):
        (tmp_path / name).mkdir()
    (tmp_path / "named/config.json").write_text('{"model": "mine:model"}')
    (tmp_path / "run/config.json").write_text("{}")
    assert again(words, announced) == (expected or words)


@pytest.fixture
def shares(monkeypatch):
    """gpu_shares, given CUDA_VISIBLE_DEVICES and the number of GPUs; None where it is unknown."""

    def shares(workers, each, visible, present):
        monkeypatch.setattr(nvidia, "driver_gpus", lambda: present and [None] * present)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return gpu_shares(workers, each)

    return shares


@pytest.mark.parametrize(
    "workers, each, visible, present, expected",
    [
        (2, 2, None, 4, ["0,1", "2,3"]),
        (2, 2, "7,5,3,1,0", 1, ["7,5", "3,1"]),
        (2, 1, " GPU-8f2a , MIG-11ab ", None, ["GPU-8f2a", "MIG-11ab"]),
    ],
)
def test_each_worker_gets_the_next_gpus(workers, each, visible, present, expected, shares):
    assert shares(workers, each, visible, present) == expected


@pytest.mark.parametrize(
    "visible, present, message",
    [
        (
            None,
            3,
            "--workers (2) with --gpus_per_worker (2) need 4 GPUs; this machine has 3. Use less",
        ),
        ("0,-1,1", 8, "CUDA_VISIBLE_DEVICES='0,-1,1' names 1."),
    ],
)
def test_too_few_gpus_are_an_error(visible, present, message, shares):
    with pytest.raises(ValueError) as error:
        shares(2, 2, visible, present)
    assert message in str(error.value)


@pytest.mark.parametrize("visible, is_warned", [("0,1", True), ("", False)])
def test_workers_that_share_gpus_are_warned_of(visible, is_warned, shares, monkeypatch, capsys):
    monkeypatch.setattr(nvidia, "driver_version", lambda: "550.1")
    assert shares(2, None, visible, 2) == [None, None]
    assert ("all 2 workers see the same GPUs" in capsys.readouterr().out) == is_warned


def test_addresses_are_this_machines_own_different_and_free(monkeypatch):
    addresses = free_addresses(8)
    assert len({*addresses}) == 8
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ports = [taken.getsockname()[1], int(addresses[0].rpartition(":")[2])]
        monkeypatch.setattr(launcher.random, "sample", lambda *_: ports)
        assert free_addresses(1) == addresses[:1]
