"""Disturbs the workers of a run and measures the seconds from each fault to the next step.

    python benchmarks/recovery.py --fault=stop --train=--model=cnn --train=--max_steps=500
    python benchmarks/recovery.py --losses=50 --longest=20 --train=--model=mlp \\
        --train=--max_steps=3000 --train=--checkpoint_every=20

By default, the last worker gets the fault ten steps after each start. With --longest, any worker
gets it at a random moment. The last line shows the digest of the weights. It must equal the digest
of a run with --losses=0. Faults:

    kill    SIGKILL
    memory  The worker enters a control group of 64 MiB and allocates more, until the kernel kills
            it. Run as root, with control groups of version 1.
    stop    SIGSTOP
    hang    The worker sleeps between two steps.
    step    The worker sleeps within a step, as its watch sees it.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from absl import app, flags

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import rounds

CGROUP = Path("/sys/fs/cgroup/memory/towers-recovery")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}  # the other faults use SIGUSR2


def make_callbacks() -> list[Any]:
    """Returns the callback of the workers' train.py: it records each step and runs faults.

    The environment variable RECOVERY_DIR names the directory of the file "steps". While a file
    "slow" is there, each step takes 0.1 s longer.
    """
    import keras

    signals: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, frame: signals.append(number))
    directory = Path(os.environ["RECOVERY_DIR"])

    def after_step(batch: int, logs: Any) -> None:
        if signals:
            run_fault(os.environ["RECOVERY_FAULT"])
        with (directory / "steps").open("a") as file:
            file.write(f"{time.time()}\n")
        time.sleep(0.1 if (directory / "slow").exists() else 0.0)

    return [keras.callbacks.LambdaCallback(on_train_batch_end=after_step)]


def run_fault(fault: str) -> None:
    """Allocates memory or sleeps until something ends the process."""
    if fault == "memory":
        CGROUP.mkdir(exist_ok=True)
        (CGROUP / "memory.limit_in_bytes").write_text(str(64 * 2**20))
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
        bytearray(os.urandom(2**20)) * 1000
    if fault == "step":
        from towers.workers import watch, workers

        with watch.watched(workers.join_workers(), "a train step"):
            time.sleep(3600)
    time.sleep(3600)


def cause_faults(
    launcher: subprocess.Popen, lines: Sequence[tuple[float, str]], steps: Path
) -> list[float]:
    """Sends faults until there were --losses of them or the run ends; returns their times.

    lines: the launcher's output so far, (time, line).
    steps: the file to which all workers append the time of each step.
    """
    faults: list[float] = []
    given, rng = flags.FLAGS, random.Random(0)
    while len(faults) < given.losses and launcher.poll() is None:
        time.sleep(rng.uniform(0, given.longest) or 0.05)
        starts = [0.0, *restart_times(lines)]
        num_steps = len(step_times(steps, starts[-1]))
        is_ready = len(starts) > len(faults) and num_steps > 10 * given.workers
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        if children and (given.longest or is_ready):
            with suppress(ProcessLookupError):
                victim = rng.choice(children) if given.longest else children[-1]
                os.kill(int(victim), SIGNALS.get(given.fault, signal.SIGUSR2))
                faults.append(time.time())
    return faults


def restart_times(lines: Sequence[tuple[float, str]]) -> list[float]:
    """Returns when the launcher restarted the workers."""
    return [at for at, line in lines if line.startswith("Restart")]


def step_times(steps: Path, after: float) -> list[float]:
    """Returns when workers completed a step, after a moment."""
    return [at for at in map(float, steps.read_text().split()) if at > after]


def main(argv: list[str]) -> None:
    """Runs train.py with faults; prints the seconds after each fault, and the digest."""
    del argv
    given = flags.FLAGS
    lines: list[tuple[float, str]] = []
    seconds: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        slow, steps = Path(directory, "slow"), Path(directory, "steps")
        steps.touch()
        if given.longest:
            slow.touch()
        launcher = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "towers.launch",
                f"--workers={given.workers}",
                "--rejoin_after=0",
                "--max_restarts=1000",
                "--",
                "train.py",
                "--epochs=10000",
                f"--run_dir={directory}/run",
                f"--num_towers={given.workers}",
                "--num_gpus=1",
                "--callbacks=benchmarks.recovery:make_callbacks",
                *given.train,
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "RECOVERY_DIR": directory,
                "RECOVERY_FAULT": given.fault,
                "PYTHONPATH": str(ROOT),
            },
        )
        timed_lines = ((time.time(), line) for line in launcher.stdout or ())
        reader = Thread(target=lines.extend, args=[timed_lines])
        reader.start()
        faults = cause_faults(launcher, lines, steps)
        slow.unlink(missing_ok=True)
        reader.join()
        for restart in restart_times(lines):
            fault = max(at for at in faults if at < restart)
            next_step = step_times(steps, restart)[0]
            seconds.append((restart - fault, next_step - fault))
            print("restart after {:.1f} s, next step after {:.1f} s".format(*seconds[-1]))
    shared = {
        "workload": next((word[8:] for word in given.train if word.startswith("--model=")), "cnn"),
        "num_devices": given.workers,
        "contender": given.fault,
    }
    rows = [
        {**shared, "measure": measure, "round": index, "value": round(value, 2)}
        for index, values in enumerate(seconds)
        for measure, value in zip(("restart_seconds", "next_step_seconds"), values, strict=True)
    ]
    rounds.append_csv(given.out, rows)
    print(f"{len(faults)} losses, {len(restart_times(lines))} restarts: {lines[-1][1]}")


if __name__ == "__main__":  # train.py imports this module, and has flags of its own
    flags.DEFINE_integer("workers", 2, "Number of workers.")
    flags.DEFINE_enum(
        "fault", "kill", ["kill", "memory", "stop", "hang", "step"], "The fault that a worker gets."
    )
    flags.DEFINE_string("out", None, "CSV to append to.")
    flags.DEFINE_integer("losses", 5, "Number of faults.")
    flags.DEFINE_float(
        "longest", 0.0, "Longest time in seconds between two faults at random moments."
    )
    flags.DEFINE_multi_string("train", [], "A flag of train.py. May be repeated.")
    app.run(main)
