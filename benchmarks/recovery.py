"""Makes a run lose workers again and again: seconds from a loss to the next step, and the weights.

    python benchmarks/recovery.py --fault=stop --train=--model=cnn --train=--max_steps=500
    python benchmarks/recovery.py --losses=50 --longest=20 --train=--model=mlp \\
        --train=--max_steps=3000 --train=--checkpoint_every=20

Every restart begins with all workers. The last worker gets the fault after ten steps, or with
--longest any worker at any moment. A run with --losses=0 must end with the same weights. Faults:

    kill    SIGKILL
    memory  it enters a control group of 64 MiB and takes more, until the kernel kills it; as root
    stop    SIGSTOP
    hang    a sleep between two steps
    step    a sleep that the worker's watch takes for a part of a step
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
GROUP = Path("/sys/fs/cgroup/memory/towers-recovery")  # control groups, version 1
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}  # others: see `suffer`


def callbacks() -> list[Any]:
    """The callback of train.py's workers: it notes each step, pauses, and may get a fault."""
    import keras

    due = list[int]()
    signal.signal(signal.SIGUSR2, lambda number, frame: due.append(number))

    def note(batch: int, logs: Any) -> None:
        if due:
            suffer()
        with open(Path(os.environ["NOTES"], "steps"), "a") as file:
            file.write(f"{time.time()}\n")
        time.sleep(0.1 if Path(os.environ["NOTES"], "slow").exists() else 0.0)

    return [keras.callbacks.LambdaCallback(on_train_batch_end=note)]


def suffer() -> None:
    if os.environ["FAULT"] == "memory":  # takes more until the kernel kills the process
        GROUP.mkdir(exist_ok=True)
        (GROUP / "memory.limit_in_bytes").write_text(str(64 * 2**20))
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
        bytearray(os.urandom(2**20)) * 1000
    if os.environ["FAULT"] == "step":
        from towers.workers import watch, workers

        with watch.watched(workers.join_workers(), "a train step"):
            time.sleep(3600)
    time.sleep(3600)


def lose_workers(launcher: subprocess.Popen, lines: Sequence[tuple[float, str]], steps: Path,
                 given: Any) -> list[float]:
    """Returns the times at which a worker got the fault."""
    lost, generator = list[float](), random.Random(0)
    while len(lost) < given.losses and launcher.poll() is None:
        time.sleep(generator.uniform(0, given.longest) or 0.05)
        begins = [0.0, *restarts(lines)]
        is_ready = len(begins) > len(lost) and len(times(steps, begins[-1])) > 10 * given.workers
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        if children and (given.longest or is_ready):
            with suppress(ProcessLookupError):
                victim = generator.choice(children) if given.longest else children[-1]
                os.kill(int(victim), SIGNALS.get(given.fault, signal.SIGUSR2))
                lost.append(time.time())
    return lost


def restarts(lines: Sequence[tuple[float, str]]) -> list[float]:
    return [at for at, line in lines if line.startswith("Restart")]


def times(steps: Path, after: float) -> list[float]:
    return [at for at in map(float, steps.read_text().split()) if at > after]


def main(argv: list[str]) -> None:  # prints the seconds after each loss, and the digest
    given, lines = flags.FLAGS, list[tuple[float, str]]()
    with tempfile.TemporaryDirectory() as directory:
        slow, steps = Path(directory, "slow"), Path(directory, "steps")
        for path in [steps, slow][:2 if given.longest else 1]:
            path.touch()
        launcher = subprocess.Popen(
            [sys.executable, "-m", "towers.launch", f"--workers={given.workers}",
             "--rejoin_after=0", "--max_restarts=1000", "--", "train.py", "--epochs=10000",
             f"--run_dir={directory}/run", f"--num_towers={given.workers}", "--num_gpus=1",
             "--callbacks=benchmarks.recovery:callbacks", *given.train],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "NOTES": directory, "FAULT": given.fault, "PYTHONPATH": str(ROOT)},
        )
        out = ((time.time(), line) for line in launcher.stdout or ())
        reader = Thread(target=lines.extend, args=[out])
        reader.start()
        lost = lose_workers(launcher, lines, steps, given)
        slow.unlink(missing_ok=True)
        reader.join()
        for end in restarts(lines):
            begin = max(at for at in lost if at < end)
            seconds = f"{end - begin:.1f} s, next step after {times(steps, end)[0] - begin:.1f} s"
            print(f"restart after {seconds}")
    print(f"{len(lost)} losses, {len(restarts(lines))} restarts: {lines[-1][1]}")


if __name__ == "__main__":
    flags.DEFINE_integer("workers", 2, "Processes.")
    flags.DEFINE_enum("fault", "kill", ["kill", "memory", "stop", "hang", "step"],
                      "What happens.")
    flags.DEFINE_integer("losses", 5, "How many.")
    flags.DEFINE_float("longest", 0.0, "The longest time between two faults at random moments.")
    flags.DEFINE_multi_string("train", [], "Flags of train.py.")
    app.run(main)
