"""Reads data that is four times as large as memory; prints examples per second and peak memory.

    python benchmarks/data.py                    2 minutes, as root on Linux; writes 3 GB to --dir

Each reader runs in a fresh process in its own control group. If it needs more memory than the
limit, the kernel kills it, and its row says so. Cached pages of the file count too, but the kernel
frees them in time. The examples are read in random order and batched, but not trained on.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.process import ROOT
from benchmarks.rounds import append_csv

SHAPE, BATCH_SIZE, WARM_UP_BATCHES = (96, 96, 3), 128, 4
MIB = 2**20
READERS = {
    "thread": "towers, a thread",
    "processes": "towers, --data_workers=2",
    "streamed": "towers, a tf.data.Dataset, --shuffle_buffer=1000",
    "indexed": "tf.data alone: shuffled indices, tf.numpy_function",
    "cached": "tf.data alone: from_generator, cache, shuffle",
}
CGROUPS = (
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    ("/sys/fs/cgroup", "memory.max", "memory.peak"),
)  # version 1, then 2

_LIMIT = flags.DEFINE_integer(
    "limit_mib", 768, "Memory limit of each reader, a quarter of the file."
)
_SECONDS = flags.DEFINE_float("seconds", 12, "Time for which each reader is measured.")
_DIR = flags.DEFINE_string("dir", None, "Directory of the file. Default: a temporary directory.")
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")


class Images:
    """A random-access source: a memory-mapped file of images."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._count = os.path.getsize(path) // int(np.prod(SHAPE))
        self._x: np.memmap | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int32]:
        if self._x is None:
            self._x = np.memmap(self._path, np.uint8, "r", shape=(self._count, *SHAPE))
        return np.asarray(self._x[index]), np.int32(index % 10)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_x": None}


def make_batches(reader: str, images: Images) -> Iterable:
    """Returns the batches of an epoch; all readers convert uint8 to float32 in [0, 1]."""
    import tensorflow as tf

    from towers.app.datasets.batches import load_examples
    from towers.resume.epoch import Epoch
    from towers.app.datasets.random_access import split_of
    from towers.app.datasets.tf_data import Streamed
    from towers.app.config import TrainConfig

    count = len(images)
    spec = (tf.TensorSpec(SHAPE, tf.uint8), tf.TensorSpec([], tf.int32))
    in_order = tf.data.Dataset.from_generator(
        lambda: map(images.__getitem__, range(count)), output_signature=spec
    ).map(lambda x, y: (tf.cast(x, tf.float32) / 255, y))
    if reader == "cached":
        return in_order.cache().shuffle(count).batch(BATCH_SIZE).prefetch(2)
    if reader == "indexed":

        def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            x, y = tf.numpy_function(images.__getitem__, [index], (tf.uint8, tf.int32))
            return tf.ensure_shape(tf.cast(x, tf.float32) / 255, SHAPE), tf.ensure_shape(y, [])

        indices = tf.data.Dataset.range(count).shuffle(count)
        return indices.map(read, tf.data.AUTOTUNE).batch(BATCH_SIZE).prefetch(2)
    name = "the file"
    split = (
        Streamed(in_order, name, count)
        if reader == "streamed"
        else split_of(images, name, 10, custom_loss=False)[0]
    )
    options = TrainConfig(data_workers=2 if reader == "processes" else 0, shuffle_buffer=1000)
    return load_examples(split, options).batches(Epoch(BATCH_SIZE, 0, 0))


def measure(reader: str, path: str, seconds: float) -> dict[str, float]:
    """Reads for this time after the warm-up batches; call it in a fresh process."""
    start, count = 0.0, 0
    for index, _ in enumerate(make_batches(reader, Images(path))):
        if index == WARM_UP_BATCHES:
            start = time.monotonic()
        if index > WARM_UP_BATCHES:
            count += BATCH_SIZE
            if time.monotonic() - start > seconds:
                break
    return {"examples_per_second": count / (time.monotonic() - start)}


@contextmanager
def control_group(limit: int) -> Iterator[tuple[Path, Path]]:
    """Creates a control group; yields the files of its processes and of its peak memory.

    limit: bytes.
    """
    for root, maximum, peak in CGROUPS:
        group = Path(root) / f"towers-{os.getpid()}"
        try:
            group.mkdir()
            (group / maximum).write_text(str(limit))
        except OSError:
            continue
        try:
            yield group / "cgroup.procs", group / peak
        finally:
            while (group / "cgroup.procs").read_text():  # the reader's own processes end after it
                time.sleep(0.1)
            group.rmdir()
        return
    raise app.UsageError("cannot create a control group. Run this as root on Linux.")


def run_reader(reader: str, path: str, limit: int) -> dict[str, str | int]:
    """Measures a reader in its own process and control group; prints and returns its row."""
    arguments = json.dumps({"reader": reader, "path": path, "seconds": _SECONDS.value})
    command = [sys.executable, "-m", "benchmarks.process", "data.measure", arguments]
    with control_group(limit) as (processes, peak):
        done = subprocess.run(
            ["sh", "-c", f'echo $$ > {processes}; exec "$@"', "sh", *command],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        memory = int(peak.read_text()) / MIB
    rate = f"{json.loads(done.stdout)['examples_per_second']:.0f}" if done.stdout else "killed"
    print(f"{READERS[reader]:52} {rate:>8} examples/s  {memory:6.0f} MiB", flush=True)
    return {
        "contender": READERS[reader],
        "measure": "examples_per_second",
        "round": 0,
        "value": rate,
        "peak_memory_mb": f"{memory:.0f}",
    }


def main(argv: list[str]) -> None:
    """Measures every reader and appends to the CSV."""
    del argv
    with tempfile.TemporaryDirectory(dir=_DIR.value) as directory:
        path = f"{directory}/images.bin"
        with open(path, "wb") as file:
            for part in range(_LIMIT.value // 4):
                file.write(np.random.default_rng(part).bytes(16 * MIB))
        rows = [run_reader(reader, path, _LIMIT.value * MIB) for reader in READERS]
    append_csv(_OUT.value, rows)


if __name__ == "__main__":
    app.run(main)
