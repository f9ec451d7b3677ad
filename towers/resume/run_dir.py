"""The run directory: one directory for each run, made before step 1, written to atomically.

It lies on a disk, or behind a URL that fsspec knows (see `remote_dir`).

    runs/cnn-mnist-001/
        config.json   every field of TrainConfig
        classes.json  the names of the classes, by label, where the data have names for them
        results.csv   one row an epoch
        results.png   the same as curves
        best.keras    the model of the epoch with the best --monitor
        final.keras   the model at the end
        checkpoints/  what the run continues from (see `checkpoints`)
        log.txt       what the terminal showed, and TensorFlow's own messages
        tensorboard/  with --tensorboard: event files
        profile/      with --profile: traces of steps
"""

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from towers.machine import places

RUNS = Path("runs")
CONFIG = "config.json"
CLASSES = "classes.json"
RESULTS = "results.csv"
BEST = "best.keras"
FINAL = "final.keras"
LOG = "log.txt"
CHECKPOINTS = "checkpoints"
PROFILE = "profile"
LOCK = "lock"  # in CHECKPOINTS
COMPLETE = "complete"  # in CHECKPOINTS: the step at which the run has ended

_held: set[TextIO] = set()  # the open files of this process' locks


class Result(NamedTuple):
    """One epoch, as a row of results.csv.

    epoch: from 1.
    values: {"loss": ..., metric: ...}, means over the epoch's training batches, while the
        parameters changed; then {"val_loss": ..., ...} of the test examples, after the epoch.
    seconds: the whole epoch, validation included.
    examples_per_second: of the training steps; the run's first step, which traces, left out.
    """

    epoch: int
    values: dict[str, float]
    seconds: float
    examples_per_second: float

    @classmethod
    def of(cls, row: Sequence[float], names: Sequence[str]) -> "Result":
        """The result that a row holds; `names`: of its values, in order."""
        epoch, *values, seconds, examples_per_second = row
        named = dict(zip(names, values, strict=True))
        return cls(int(epoch), named, seconds, examples_per_second)

    @property
    def row(self) -> list[float]:
        """Its values, in the order of the columns."""
        return [self.epoch, *self.values.values(), self.seconds, self.examples_per_second]


def check(run_dir: str | None) -> None:
    """Refuses a directory that a new run cannot have, before any time is spent; makes nothing.

    Raises:
        ValueError: see `create`.
    """
    if run_dir is None:
        return
    path = Path(run_dir)
    with explained(path):
        if path.is_dir() and any(path.iterdir()):
            raise not_empty(path, (path / CONFIG).exists())
        if path.exists() and not path.is_dir():
            raise ValueError(f"run_dir ({path}) is a file; name a directory.")


def create(run_dir: str | None, name: str, config: str, begun: Path = Path()) -> Path:
    """Makes the directory of a new run, with its config.json.

    Two processes never get the same directory: a numbered one is made by a single mkdir, and
    config.json by a single exclusive open.

    Args:
        run_dir: the directory; None means the next free runs/<name>-001, -002, ...
        name: of the run, such as "cnn-mnist".
        config: the text of config.json.
        begun: what relative paths begin in.

    Returns:
        The directory, as a path in `begun`.

    Raises:
        ValueError: it is not empty (says how to resume), a file, or cannot be written.
    """
    if run_dir is None:
        named = _create_numbered(file_name(name), begun)
    else:
        named = Path(run_dir)
        check(str(begun / named))
        with explained(named):
            (begun / named).mkdir(parents=True, exist_ok=True)
    path = begun / named
    with explained(path):
        try:
            (path / CONFIG).open("x").close()
        except FileExistsError:
            raise not_empty(path, (path / CONFIG).exists()) from None
        write_config(path, config)
    return named


def write_config(path: Path, config: str) -> None:
    """Replaces config.json; raises ValueError if it cannot be written."""
    with explained(path):
        write_text(path / CONFIG, config)


def write_class_names(path: Path, names: Sequence[str]) -> None:
    """Writes classes.json, a list, if there are names; raises ValueError if it cannot."""
    if names:
        with explained(path):
            write_text(path / CLASSES, json.dumps(list(names), indent=2) + "\n")


def remove_temporary_files(path: Path) -> None:
    """Removes what a process that was killed has left of its `write_atomically`."""
    for file in path.glob(".*.tmp*"):
        file.unlink(missing_ok=True)


def file_name(name: str) -> str:
    """`name` with what a file name should not hold replaced: "pkg.mod:fn" -> "pkg.mod_fn"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".-")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file so that `path` holds either its old or its new contents, never a part.

    Args:
        path: the file.
        write: writes the contents to the path that it is given: a temporary file in the same
            directory, with the same suffix.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        flush_to_disk(temporary)
        os.replace(temporary, path)
        flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text so, in UTF-8 and with its line ends as they are."""
    write_atomically(path, lambda file: file.write_bytes(text.encode()))


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a directory, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_results(path: Path, names: Sequence[str], rows: Sequence[Sequence[float]]) -> None:
    """Replaces results.csv by these rows, whatever it held; without any, there is no file.

    Args:
        path: of the file.
        names: of the values of a `Result`.
        rows: see `Result.row`.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    lines = [["epoch", *names, "seconds", "examples_per_second"]]
    lines += [[f"{int(row[0])}", *(f"{value:.6g}" for value in row[1:])] for row in rows]
    if rows:
        write_text(path, "".join(f"{','.join(line)}\n" for line in lines))
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, argument: str = "run_dir") -> Iterator[None]:
    """Holds a run's lock. The system frees it when the process ends, however it ends.

    A forked child shares the open file, and with it the lock: it closes the file at once.

    Args:
        path: the directory.
        argument: what the user calls it.

    Raises:
        ValueError: another process holds it, or it cannot be made.
    """
    with explained(path, argument):
        (path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        file = (path / CHECKPOINTS / LOCK).open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{path} is in use: process {file.read(20).strip() or 'unknown'} trains there. "
                "Wait for its end, or stop it."
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)


def _close_in_child() -> None:
    """Leaves the locks to the process that took them."""
    while _held:
        _held.pop().close()


os.register_at_fork(after_in_child=_close_in_child)


def _create_numbered(name: str, begun: Path) -> Path:
    """The next free runs/<name>-NNN in `begun`; the number after the highest one there."""
    with explained(RUNS):
        (begun / RUNS).mkdir(parents=True, exist_ok=True)
        taken = [
            int(path.name[len(name) + 1:])
            for path in (begun / RUNS).glob(f"{name}-*")
            if path.name[len(name) + 1:].isdecimal()
        ]
        for number in count(max(taken, default=0) + 1):
            path = RUNS / f"{name}-{number:03d}"
            try:
                (begun / path).mkdir()
            except FileExistsError:
                continue
            return path
    raise AssertionError("numbers do not end")


def is_remote(directory: Any) -> bool:
    """Whether a directory is a URL: "s3://bucket/run"; "file:///runs/1" is an ordinary path."""
    return isinstance(directory, str) and "://" in places.as_path(directory)


def open_remote(url: str) -> Any:
    """fsspec's view of the directory behind a URL."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.dirfs import DirFileSystem

    files, root = url_to_fs(url)
    return DirFileSystem(root, files)


def read_config(directory: str, argument: str = "run_dir") -> str | None:
    """The text of config.json in a directory, a local or a remote one; None if there is none.

    Raises:
        ValueError: the remote directory cannot be reached.
    """
    with suppress(OSError, UnicodeDecodeError):
        if not is_remote(directory):
            return (Path(directory) / CONFIG).read_text(encoding="utf-8")
        with explained(directory, argument), suppress(FileNotFoundError):
            return str(open_remote(directory).cat_file(CONFIG).decode())
    return None


@contextmanager
def explained(path: Path | str, argument: str = "run_dir") -> Iterator[None]:
    """Turns what the system or a protocol's package refuses into a ValueError with the argument."""
    try:
        yield
    except Exception as error:
        if is_remote(path):  # each package has errors of its own
            said, fix = reason(error), ""
            if isinstance(error, ImportError):
                fix = " pip install 'tf-towers[remote]' brings what s3:// needs."
        elif isinstance(error, OSError):
            said = f"{error.strerror}: {error.filename}"
            fix = " Name a directory that you can write to."
        else:
            raise
        raise ValueError(f"{argument} ({path}) cannot be used: {said}.{fix}") from error


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    return " ".join(str(error).split()).rstrip(".") or repr(error)


def not_empty(directory: Path | str, holds_run: bool) -> ValueError:
    """The error of a new run whose directory holds something."""
    if holds_run:
        return ValueError(
            f"run_dir ({directory}) holds a run. To continue it: resume={directory}; for a new "
            "run, name another directory."
        )
    return ValueError(
        f"run_dir ({directory}) is not empty; name a new directory or an empty one."
    )
