"""Data four times as large as memory: examples per second and peak memory, under a real limit.

    python benchmarks/data.py                    2 minutes, as root on Linux; writes 3 GB to --dir

Each way to read runs in a fresh process and a control group of its own, whose limit the system
enforces: what takes more is killed, and its row says so. Pages of the file that the system keeps
count, but are given back in time. Examples are read in random order and batched, not trained on.
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

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402  (found through the line above; TensorFlow reads the variable)
from absl import app, flags  # noqa: E402

from benchmarks.rounds import append_csv  # noqa: E402

SHAPE, BATCH, WARM_UP = (96, 96, 3), 128, 4
MIB = 2**20
WAYS = {
    "thread": "towers, a thread",
    "processes": "towers, --data_workers=2",
    "streamed": "towers, a tf.data.Dataset, --shuffle_buffer=1000",
    "indexed": "tf.data alone: shuffled indices, tf.numpy_function",
    "cached": "tf.data alone: from_generator, cache, shuffle",
}
CGROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
           ("/sys/fs/cgroup", "memory.max", "memory.peak"))  # version 1, then 2

_LIMIT = flags.DEFINE_integer("limit_mib", 768, "Memory of each process group.")
_SECONDS = flags.DEFINE_float("seconds", 12, "For which each way reads.")
_DIR = flags.DEFINE_string("dir", None, "The directory of the file. Default: a temporary one.")
_WAY = flags.DEFINE_enum("way", None, list(WAYS), "Read this way, here and now.")
_FILE = flags.DEFINE_string("file", None, "What that way reads.")
_OUT = flags.DEFINE_string("out", "benchmarks/results/data.csv", "CSV to append to.")


class Images:
    """A memory-mapped file of images as a random-access source."""

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


def batches(way: str, images: Images) -> Iterable:
    """An epoch, read that way; uint8 becomes float32 in [0, 1] everywhere."""
    import tensorflow as tf

    from towers.app.datasets import batches as input_lib
    from towers.app.datasets.random_access import split_of
    from towers.resume.source import InputOptions
    from towers.app.datasets.tf_data import Streamed

    count = len(images)
    spec = (tf.TensorSpec(SHAPE, tf.uint8), tf.TensorSpec([], tf.int32))
    in_order = tf.data.Dataset.from_generator(
        lambda: map(images.__getitem__, range(count)), output_signature=spec
    ).map(lambda x, y: (tf.cast(x, tf.float32) / 255, y))
    if way == "cached":
        return in_order.cache().shuffle(count).batch(BATCH).prefetch(2)
    if way == "indexed":
        def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            x, y = tf.numpy_function(images.__getitem__, [index], (tf.uint8, tf.int32))
            return tf.ensure_shape(tf.cast(x, tf.float32) / 255, SHAPE), tf.ensure_shape(y, [])

        indices = tf.data.Dataset.range(count).shuffle(count)
        return indices.map(read, tf.data.AUTOTUNE).batch(BATCH).prefetch(2)
    workers = 2 if way == "processes" else 0
    options = InputOptions(data_workers=workers, shuffle_buffer=1000)
    where = "the file"
    streamed = way == "streamed"
    split = (
        Streamed(in_order, where, count) if streamed
        else split_of(images, where, 10, custom_loss=False)[0]
    )
    return input_lib.shuffled_batches(input_lib.load_examples(split, options), BATCH, 0, 0)


def measure(way: str, path: str, seconds: float) -> None:
    """Reads for so long; prints the examples per second after the first batches, a JSON line."""
    began, done = 0.0, 0
    for number, _ in enumerate(batches(way, Images(path))):
        if number == WARM_UP:
            began = time.monotonic()
        if number > WARM_UP:
            done += BATCH
            if time.monotonic() - began > seconds:
                break
    print(json.dumps({"examples_per_second": done / (time.monotonic() - began)}), flush=True)
    os._exit(0)  # nobody waits for what is under way


@contextmanager
def control_group(limit: int) -> Iterator[tuple[Path, Path]]:
    """A new one with that limit: (where processes enter it, where its peak stands)."""
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
            while (group / "cgroup.procs").read_text():  # they end with the one that started them
                time.sleep(0.1)
            group.rmdir()
        return
    raise app.UsageError("no control group can be made here: run as root on Linux.")


def run(way: str, path: str, limit: int) -> dict[str, str]:
    """Runs one way to read in its own process and control group."""
    command = [sys.executable, __file__, f"--way={way}", f"--file={path}",
               f"--seconds={_SECONDS.value}"]
    with control_group(limit) as (entrance, peak):
        done = subprocess.run(
            ["sh", "-c", f'echo $$ > {entrance}; exec "$@"', "sh", *command],
            capture_output=True, text=True, check=False,
        )
        memory = int(peak.read_text()) / MIB
    rate = f"{json.loads(done.stdout)['examples_per_second']:.0f}" if done.stdout else "killed"
    print(f"{WAYS[way]:52} {rate:>8} examples/s  {memory:6.0f} MiB", flush=True)
    return {"way": WAYS[way], "examples_per_second": rate, "peak_mib": f"{memory:.0f}"}


def main(argv: list[str]) -> None:
    """Measures every way and appends to the CSV."""
    del argv
    if _WAY.value and _FILE.value:
        measure(_WAY.value, _FILE.value, _SECONDS.value)
    limit = _LIMIT.value * MIB
    with tempfile.TemporaryDirectory(dir=_DIR.value) as directory:
        path = f"{directory}/images.bin"
        with open(path, "wb") as file:
            for part in range(4 * _LIMIT.value // 16):
                file.write(np.random.default_rng(part).bytes(16 * MIB))
        rows = [run(way, path, limit) for way in WAYS]
    shared = {"limit_mib": _LIMIT.value, "file_mib": 4 * _LIMIT.value}
    append_csv(Path(_OUT.value), [{**row, **shared} for row in rows])


if __name__ == "__main__":
    app.run(main)
