"""Makes one directory for each run before step 1, and writes its settings and results.

The directory is on a disk, or behind a URL of fsspec (see `remote_dir`).

    runs/cnn-mnist-001/
        config.json   every field of TrainConfig
        classes.json  the names of the classes by label, if the data have names
        results.csv   one row for each epoch
        results.png   curves of results.csv
        augmented.png with --augment: examples and their versions in the first epochs
        best.keras    the model of the epoch with the best --monitor
        best-epoch-3.keras ...  with --keep_best: the models of the best epochs
        final.keras   the model at the end
        confusion.png with --confusion_matrix: which classes the final model takes for which
        checkpoints/  the states from which the run can resume (see `checkpoints`)
        ledger.csv    digests of parameters, batches and seeds (see `ledger`)
        log.txt       the terminal's output and TensorFlow's messages
        tensorboard/  with --tensorboard: event files
        profile/      with --profile: traces of steps
        export/       with --fast_dev_run: the model as a SavedModel
"""

import fcntl
import fnmatch
import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from towers.machine import files
from towers.machine.words import printable
from towers.resume.directories import (
    TEMPORARY,
    explained,
    file_name,
    is_remote,
    open_remote,
    write_text,
)

RUNS, PROFILE, EXPORT = Path("runs"), "profile", "export"
CONFIG, CLASSES, RESULTS = "config.json", "classes.json", "results.csv"
BEST, FINAL, LOG = "best.keras", "final.keras", "log.txt"


def check(run_dir: str | None) -> None:
    """Raises ValueError if a new run cannot have this directory. It makes no files."""
    if run_dir is None:
        return
    path = Path(run_dir)
    with explained(path):
        names = set(os.listdir(path)) if path.is_dir() else set()
        names.difference_update(fnmatch.filter(names, TEMPORARY))
        if names and (names != {CONFIG} or (path / CONFIG).lstat().st_size):
            raise not_empty(path, CONFIG in names)
        if path.exists() and not path.is_dir():
            raise ValueError(f"run_dir ({path}) is a file; name a directory.")


def create(run_dir: str | None, name: str, config: str, begun: Path = Path()) -> Path:
    """Makes the directory of a new run, with its config.json, whose text is `config`.

    Two processes never get the same directory: one mkdir makes a numbered directory, and a lock
    guards config.json. An empty config.json, from a killed process or a full disk, is no run, and
    neither is a temporary file.

    run_dir: None means the next free runs/<name>-001, -002, ...
    begun: the directory that relative paths, and the result, start from.
    """
    if run_dir is None:
        named = _create_numbered(file_name(name), begun)
    else:
        named = Path(run_dir)
        check(str(begun / named))
    path = begun / named
    with explained(named):
        path.mkdir(parents=True, exist_ok=True)
        with files.open_to_lock(path / CONFIG) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the next process waits until the text is written
            if (path / CONFIG).stat().st_size:  # not of `file`, which another process may replace
                raise not_empty(path, holds_run=True)
            write_text(path / CONFIG, config)
    return named


def write_config(path: Path, config: str, class_names: Sequence[str] = ()) -> None:
    """Replaces config.json, and classes.json if there are names; ValueError if it cannot."""
    with explained(path):
        write_text(path / CONFIG, config)
        write_class_names(path, class_names)


def write_class_names(path: Path, class_names: Sequence[str]) -> None:
    """Writes classes.json if there are names."""
    if class_names:
        write_text(path / CLASSES, json.dumps(list(class_names), indent=2) + "\n")


def write_results(path: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Replaces results.csv by these rows, one for each epoch. Without rows, removes the file.

    names: the means over the epoch's training batches, such as "loss"; then means over the test
        examples after the epoch, such as "val_loss".
    rows: [epoch, one number for each name, seconds, examples per second, digest].
    """
    lines = [["epoch", *names, "seconds", "examples_per_second", "digest"]]
    for epoch, *numbers, digest in rows:
        figures = [f"{number:.6g}" for number in numbers]
        lines.append([str(int(epoch)), *figures, printable(digest)])
    if rows:
        write_text(path, "".join(f"{','.join(line)}\n" for line in lines))
    else:
        path.unlink(missing_ok=True)


def _create_numbered(name: str, begun: Path) -> Path:
    """Makes runs/<name>-NNN in `begun`, where NNN follows the highest number there."""
    with explained(RUNS):
        (begun / RUNS).mkdir(parents=True, exist_ok=True)
        endings = [path.name[len(name) + 1 :] for path in (begun / RUNS).glob(f"{name}-*")]
        taken = [int(ending) for ending in endings if ending.isdecimal()]
        for number in count(max(taken, default=0) + 1):
            path = RUNS / f"{name}-{number:03d}"
            with suppress(FileExistsError):
                (begun / path).mkdir()
                return path
    raise AssertionError("numbers do not end")


def read_config(directory: Path | str, argument: str = "run_dir") -> str | None:
    """Returns config.json's text, or None if there is none or it is empty.

    Raises ValueError if the file cannot be read, is a link or too large, or a URL is unreachable.
    """
    content = b""
    with explained(directory, argument), suppress(FileNotFoundError, NotADirectoryError):
        if is_remote(directory):
            with open_remote(str(directory)).open(CONFIG, "rb") as file:
                content = file.read(files.SMALL + 1)
        else:
            content = files.read(Path(directory) / CONFIG, files.SMALL)
    try:
        if len(content) > files.SMALL:
            raise ValueError(f"it is larger than {files.SMALL:,} bytes")
        return content.decode() or None
    except ValueError as error:
        raise ValueError(f"{argument} ({directory}): {CONFIG} is no text: {error}.") from None


def not_empty(directory: Path | str, holds_run: bool) -> ValueError:
    """Returns the error for a new run whose directory is not empty."""
    said = "is not empty; name a new directory or an empty one."
    if holds_run:
        resume = shlex.quote(str(directory))
        said = f"holds a run. To continue it: resume={resume}; for a new run, name another."
    return ValueError(f"run_dir ({directory}) {said}")
