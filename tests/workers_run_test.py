"""train.py on several real workers: same bits, real signals, and what is refused."""

import csv
import hashlib
import io
import os
import signal
import time

import pytest

from tests import processes as workers
from tests import resuming
from tests.processes import (
    NAMESPACE,
    SMALL_DISK,
    children,
    skip_where_nothing_can_be_mounted,
)
from towers.app.after_training.model_files import file_config
from towers.app.after_training.predicting import predict_file
from towers.app.reporting.report import Report
from towers.workers.cluster import LOST_WORKER

FLAGS = (
    "--model=tests.resuming:faulty_model",
    "--dataset=tests.resuming:data",
    "--num_towers=4",
    "--num_gpus=2",
    "--batch_size=8",
    "--epochs=2",
    "--checkpoint_every=1",
)  # 7 steps an epoch: 50 = 6 x 8 + 2
TRUST = "--trust_run_dir"  # because the run names modules of tests


def train(count, run_dir, *flags, **environment):
    """All workers of a run, started."""
    return workers.start_all(
        count, "train.py", f"--run_dir={run_dir}", *FLAGS, *flags, **environment
    )


def resume(count, run_dir, **environment):
    """The same, of one that goes on."""
    return workers.start_all(count, "train.py", f"--resume={run_dir}", TRUST, **environment)


def finish(processes, expected=0):
    ended = workers.finish(processes, timeout=200)
    assert [code for code, _, _ in ended] == [expected] * len(ended), ended
    return ended


def bits(run_dir):
    """Of the run's last state, and of its rows but for their times."""
    newest = run_dir / "checkpoints/epoch-2-step-14/arrays.bin"
    rows = (run_dir / "results.csv").read_text().splitlines()
    return (hashlib.sha256(newest.read_bytes()).hexdigest(), [row.split(",")[:5] for row in rows])


class Hold:
    """Where the workers of a run stand still: after a step, before they agree on its end."""

    def __init__(self, step, directory):
        self.fault = {"FAULT": f"step == {step} and hold({str(directory / 'go')!r})"}
        self._directory = directory

    def wait_for(self, count):
        """Until so many workers stand there."""
        until = time.monotonic() + 120
        while len(list(self._directory.glob("go-*"))) < count:
            assert time.monotonic() < until, "the workers do not come"
            time.sleep(0.02)

    def end(self):
        (self._directory / "go").touch()


@pytest.fixture(scope="module")
def mount(tmp_path_factory):
    skip_where_nothing_can_be_mounted(tmp_path_factory.mktemp("mount"))


@pytest.fixture(scope="module")
def run_alone(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    finish(train(1, run_dir))
    return run_dir


@pytest.fixture(scope="module")
def alone(run_alone):
    return bits(run_alone)


@pytest.mark.telling("3-0-1")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "step, lost, count",
    [
        (3, 0, 1),
        (3, 0, 3),
        *((step, 1, 2) for step in range(1, 8)),
    ],
)
def test_a_run_that_lost_a_worker_and_got_a_signal_resumes_on_any_number_to_the_same_bits(
    step, lost, count, alone, tmp_path
):
    """One of two workers is killed at a step; the other says so and ends.

    When both go on, one receives SIGTERM; both save at the same step and end.
    """
    hold = Hold(step, tmp_path)
    processes = train(2, tmp_path / "run", **hold.fault)
    hold.wait_for(2)
    processes[lost].send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    hold.end()
    (code, _, errors) = workers.finish(processes)[1 - lost]
    assert time.monotonic() - killed_at < 30  # seconds; on a busy machine
    assert (code, errors.count("error:")) == (LOST_WORKER, 1), errors
    assert f"error: worker {lost} (127.0.0.1:" in errors
    assert "resume=DIR, on any number of workers." in errors

    (tmp_path / "term").mkdir()
    hold = Hold(9, tmp_path / "term")
    processes = resume(2, tmp_path / "run", **hold.fault)
    hold.wait_for(2)
    processes[1 - lost].send_signal(signal.SIGTERM)
    hold.end()
    for _, _, errors in finish(processes, expected=143):
        assert errors.count("\n") == 1 and "stopped by SIGTERM" in errors
    assert (tmp_path / "run/checkpoints/epoch-1-step-9").is_dir()

    finish(resume(count, tmp_path / "run"))
    assert bits(tmp_path / "run") == alone
    logs = {path.name for path in (tmp_path / "run").glob("log*")}
    assert logs == {"log.txt", "log-1.txt", *[f"log-{i}.txt" for i in range(1, count)]}


@pytest.mark.matrix
def test_a_full_disk_that_only_the_chief_sees_ends_no_worker(mount, alone, tmp_path):
    """It is full from the fifth step on; with room again, a run goes on from what there is.

    The other keeps a config.json and a log of its own, and hears the state from the chief.
    """
    (tmp_path / "other").mkdir()
    hosts = workers.addresses(2)
    full = "step == 5 and os.system('cat /dev/zero > filler 2> /dev/null')"
    inside = ("env", f"TF_CONFIG={workers.tf_config(hosts, 0)}", *NAMESPACE, SMALL_DISK, "sh")
    flags = ("--run_dir=run", *FLAGS[:-1], "--checkpoint_every=2")
    (code, said, _), (other, _, errors) = workers.finish(
        [
            resuming.start(*flags, cwd=tmp_path, fault=full, inside=inside),
            workers.start(hosts, 1, workers.ROOT / "train.py", *flags, cwd=tmp_path / "other"),
        ]
    )
    assert (code, other, errors) == (5, 0, "")
    assert "results.csv cannot be written (No space left on device); " in said
    finish(
        [
            workers.start(hosts, i, workers.ROOT / "train.py", "--resume=run", TRUST, cwd=cwd)
            for i, cwd in enumerate([tmp_path, tmp_path / "other"])
        ]
    )
    assert bits(tmp_path / "run") == alone
    left = {path.name for path in (tmp_path / "other/run").iterdir()}
    assert left == {"config.json", "log-1.txt"}


def test_a_worker_with_other_settings_is_an_error(tmp_path):
    hosts, run_dir = workers.addresses(2), f"--run_dir={tmp_path / 'run'}"
    other = ("--model=tests.resuming:other_model", "--dataset=tests.resuming:other_data")
    for code, _, errors in workers.finish(
        [
            workers.start(hosts, 0, "train.py", run_dir, *FLAGS),
            workers.start(hosts, 1, "train.py", run_dir, *FLAGS, *other, "--batch_size=16"),
        ]
    ):
        assert (code, errors.count("\n")) == (2, 1), errors
        for said in (
            "error: worker 1 (127.0.0.1:",
            "--model (tests.resuming:other_model, the chief's is tests.resuming:faulty_model)",
            "--dataset (tests.resuming:other_data, the chief's is tests.resuming:data)",
            "--batch_size (16, the chief's is 8)",
        ):
            assert said in errors
    assert not list((tmp_path / "run").glob("checkpoints/epoch*"))


PREDICT_AND_EVALUATE = """
import pathlib, sys
from towers.app.after_training.model_files import file_config
from towers.app.after_training.predicting import evaluate_file, predict_file
from towers.app.reporting.report import report_of
from towers.workers.workers import join_workers
file, (predictions, export) = pathlib.Path(sys.argv[1]), sys.argv[2:]
report = report_of(join_workers(), "the chief shows the result")
predict_file(file_config(file, {"trust_run_dir": True}), file, predictions, report)
evaluate_file(file_config(file, {"export": export, "trust_run_dir": True}), file, report)
"""


def test_workers_evaluate_predict_and_export_what_one_process_does(run_alone, tmp_path):
    """The run's directory names 4 towers; batches of 8, 8 and 4 examples."""
    file, alone, theirs = run_alone / "best.keras", tmp_path / "1.npz", tmp_path / "2.npz"
    config = file_config(file, {"trust_run_dir": True})
    predict_file(config, file, str(alone), Report(io.StringIO()))
    (_, stdout, _), (_, other, _) = finish(
        workers.start_all(2, "-c", PREDICT_AND_EVALUATE, file, theirs, tmp_path / "served")
    )
    assert alone.read_bytes() == theirs.read_bytes()
    with open(run_alone / "results.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    best = max(rows, key=lambda row: (float(row["val_accuracy"]), -float(row["val_loss"])))
    loss, accuracy = (float(best[name]) for name in ("val_loss", "val_accuracy"))
    assert f"Evaluate  loss {loss:.4f}  accuracy {accuracy:.4f} " in stdout
    assert (tmp_path / "served/saved_model.pb").is_file()
    assert other.count("\n") == 1  # the chief shows the result


@pytest.mark.matrix
def test_the_launcher_restarts_with_one_worker_less_to_the_same_bits(alone, tmp_path):
    hold = Hold(3, tmp_path)
    train_py = ("train.py", f"--run_dir={tmp_path / 'run'}", *FLAGS)
    launcher = workers.start(
        [""],
        0,
        "-m",
        "towers.app.launch",
        "--workers=3",
        "--",
        *train_py,
        TF_CONFIG="",
        **hold.fault,
    )
    hold.wait_for(3)
    os.kill(children(launcher.pid)[1], signal.SIGKILL)
    hold.end()
    ((code, said, _),) = workers.finish([launcher])
    assert code == 0
    assert "worker 1 was killed by SIGKILL" in said and "continues with 2 workers" in said
    assert bits(tmp_path / "run") == alone
