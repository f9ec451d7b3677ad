"""Writes files atomically, locks a directory of checkpoints, and explains errors of directories.

A directory is on a disk, or behind a URL of fsspec (see `remote_dir`).
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from towers.machine import files, places
from towers.machine.words import printable

CHECKPOINTS = "checkpoints"  # the folder of checkpoints
LOCK = "lock"  # in CHECKPOINTS
COMPLETE = "complete"  # in CHECKPOINTS: holds the last step of a run that has ended
TEMPORARY = ".*.tmp*"  # names of files that `write_atomically` has not finished


def remove_temporary_files(directory: Path) -> None:
    """Removes what a killed process has left in a directory from `write_atomically`."""
    for path in directory.glob(TEMPORARY):
        remove(path)


def remove(path: Path) -> None:
    """Removes a file or a directory if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def file_name(name: str) -> str:
    """Replaces characters that do not belong in a file name: "pkg.mod:fn" -> "pkg.mod_fn"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".-")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Replaces a file, or makes a directory, so that `path` never holds a part of the contents.

    `write` gets a temporary path in the directory of `path`, with its suffix. Its name cannot be
    guessed, so that no link of this name waits there. A link at `path` itself is replaced.
    """
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.tmp{path.suffix}")
    try:
        write(temporary)
        flush_to_disk(temporary)
        os.replace(temporary, path)
        flush_to_disk(path.parent)
    finally:
        remove(temporary)


def write_text(path: Path, text: str) -> None:
    """Writes a text atomically, in UTF-8 and with unchanged line ends."""
    write_atomically(path, lambda file: file.write_bytes(text.encode()))


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a directory, are safe from a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, argument: str = "run_dir") -> Iterator[None]:
    """Holds a run's lock, which the system frees when the process ends or is killed.

    It raises ValueError if another process holds the lock, or if a link would lead elsewhere.
    Messages call the directory `argument`.
    """
    with explained(path, argument):
        files.check_link(path / CHECKPOINTS)
        (path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        file = files.open_to_lock(path / CHECKPOINTS / LOCK)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = file.read(20).decode(errors="replace").strip()
            raise ValueError(
                f"{path} is in use: process {printable(owner) or 'unknown'} trains there. "
                "Wait for its end, or stop it."
            ) from None
        file.truncate(0)
        file.write(b"%d\n" % os.getpid())
        file.flush()
        os.register_at_fork(after_in_child=file.close)  # the child would hold the lock, too
        yield


def is_remote(directory: object) -> bool:
    """Returns whether a directory is a URL, as "s3://bucket/run". "file:///runs/1" is a path."""
    return isinstance(directory, str) and "://" in places.as_path(directory)


def open_remote(url: str) -> Any:
    """Returns an fsspec file system whose root is the directory behind a URL."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.dirfs import DirFileSystem

    files, root = url_to_fs(url)
    return DirFileSystem(root, files)


@contextmanager
def explained(path: Path | str, argument: str = "run_dir") -> Iterator[None]:
    """Turns errors of the system or of a protocol's package into ValueError with the argument."""
    try:
        yield
    except files.RefusedError as error:
        raise ValueError(
            f"{argument} ({path}) cannot be used: {error}. Put a regular file or a folder in its "
            "place, or remove it."
        ) from None
    except Exception as error:
        if is_remote(path):  # each package raises different errors
            said, fix = reason(error), ""
            if isinstance(error, ImportError):
                fix = " pip install 'tf-towers[remote]' brings what s3:// needs."
        elif isinstance(error, OSError):
            said = ": ".join(str(word) for word in (error.strerror, error.filename) if word)
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            fix = " Make room there." if is_full else " Name a directory that you can write to."
        else:
            raise
        raise ValueError(f"{argument} ({path}) cannot be used: {said}.{fix}") from error


def reason(error: Exception) -> str:
    """Returns the text of an error in one line."""
    return " ".join(str(error).split()).rstrip(".") or repr(error)
