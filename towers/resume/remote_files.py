"""Where a run directory lies: on a disk, or behind a URL that fsspec knows."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from towers.machine import places
from towers.resume import run_dir


def is_remote(directory: Any) -> bool:
    """Whether a directory is a URL: "s3://bucket/run"; "file:///runs/1" is an ordinary path."""
    return isinstance(directory, str) and "://" in places.as_path(directory)


def read_config(directory: str, argument: str = "run_dir") -> str | None:
    """The text of config.json in a directory, a local or a remote one; None if there is none.

    Raises:
        ValueError: the remote directory cannot be reached.
    """
    with suppress(OSError, UnicodeDecodeError):
        if not is_remote(directory):
            return (Path(directory) / run_dir.CONFIG).read_text(encoding="utf-8")
        with explained(directory, argument), suppress(FileNotFoundError):
            return str(open_directory(directory).cat_file(run_dir.CONFIG).decode())
    return None


def open_directory(url: str) -> Any:
    """fsspec's view of the directory behind a URL."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.dirfs import DirFileSystem

    files, root = url_to_fs(url)
    return DirFileSystem(root, files)


@contextmanager
def explained(url: str, argument: str) -> Iterator[None]:
    """Turns whatever a protocol's package raises into a ValueError that names the argument."""
    try:
        yield
    except Exception as error:
        is_missing = isinstance(error, ImportError)
        fix = " pip install 'tf-towers[remote]' brings what s3:// needs." if is_missing else ""
        raise ValueError(f"{argument} ({url}) cannot be used: {reason(error)}.{fix}") from error


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    return " ".join(str(error).split()).rstrip(".") or repr(error)
