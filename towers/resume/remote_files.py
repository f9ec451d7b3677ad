"""The files of a directory that fsspec reaches, over a connection that may be lost for a while."""

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from towers.resume import run_dir
from towers.machine import places
from towers.machine.words import plural

START_SECONDS = 20.0  # how long a first answer is waited for
_LONGEST_PAUSE = 15.0  # seconds between two attempts
_BLOCK = 2**23  # bytes read at once
# What another attempt would not mend.
_FINAL = (PermissionError, NotImplementedError, ImportError, ValueError)
_FINAL_NAMES = ("NoCredentialsError", "DefaultCredentialsError")  # of packages of one protocol

_Value = TypeVar("_Value")


class UnreachableError(Exception):
    """A remote directory refuses something, or gives no answer for too long; says why."""


class RemoteFiles:
    """The files of a remote directory, by their names in it; each method raises UnreachableError.

    patience: for how many seconds what fails is tried again.
    said: a text on each operation that took several attempts: how many, how long, and why.
    """

    def __init__(self, url: str, argument: str) -> None:
        """
        Args:
            url: of the directory.
            argument: what the user calls it.

        Raises:
            ValueError: a package is missing, or nothing is known of such a URL.
        """
        try:
            from fsspec.core import url_to_fs

            self._fs, root = url_to_fs(url)
        except ImportError as error:
            raise ValueError(
                f"{argument} ({url}) needs a package that is missing ({error}). "
                "pip install 'tf-towers[remote]' brings those of s3://; gs:// needs gcsfs beside "
                "it."
            ) from None
        except Exception as error:  # whatever a protocol makes of its part of the URL
            raise ValueError(f"{argument} ({url}) cannot be used: {error}.") from None
        self._root = root.rstrip("/")
        self.patience = START_SECONDS
        self.said: list[str] = []

    def names(self) -> list[str]:
        """The names of all files."""
        def find() -> list[str]:
            self._fs.invalidate_cache()
            with suppress(FileNotFoundError):
                return list(self._fs.find(self._root))
            return []

        begin = len(self._root) + 1
        return [path[begin:] for path in self._tried("listing it", find) if path[begin:]]

    def read(self, name: str) -> bytes:
        """The contents of a file; raises FileNotFoundError where there is none."""
        return self._tried(f"reading {name}", lambda: self._fs.cat_file(self._path(name)))

    def get(self, name: str, local: Path) -> None:
        """Downloads a file."""
        self._tried(
            f"downloading {name}", lambda: self._fs.get_file(self._path(name), str(local))
        )

    def put(self, local: Path, name: str, is_read_back: bool = False) -> None:
        """Uploads a file; then reads all of it back, where asked to."""
        def put() -> None:
            try:
                self._fs.put_file(str(local), self._path(name))
            except FileNotFoundError:  # a file system with real directories
                self._make_parent(name)
                self._fs.put_file(str(local), self._path(name))
            if is_read_back:
                with local.open("rb") as ours, self._fs.open(self._path(name), "rb") as theirs:
                    if _digest(ours) != _digest(theirs):
                        raise OSError("what is read back is not what was written")

        self._tried(f"uploading {name}", put)

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        def remove() -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

        self._tried(f"removing {name}", remove)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, name: str) -> None:
        """Makes the directories of a file; never a bucket, whose name may be a slip of the pen."""
        if not self._fs.exists(self._root.split("/")[0] or "/"):
            raise FileNotFoundError(f"{self._root.split('/')[0]} does not exist")
        self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _tried(self, what: str, call: Callable[[], _Value]) -> _Value:
        """What a call returns, in as many attempts as it takes.

        Raises:
            FileNotFoundError: as it is.
            UnreachableError: it is refused, or has failed for too long.
        """
        began, reason = time.monotonic(), ""
        for attempt in count(1):
            try:
                value = call()
            except FileNotFoundError:
                raise
            except Exception as error:  # each protocol's packages have errors of their own
                reason = " ".join(str(error).split()).rstrip(".") or repr(error)
                seconds = time.monotonic() - began
                tried = f"{attempt} {plural('attempt', attempt)} in {seconds:.0f} s"
                if isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES:
                    raise UnreachableError(f"{what}: {reason}") from error
                if seconds >= self.patience:
                    raise UnreachableError(f"{what}: {reason} ({tried})") from error
                time.sleep(min(0.5 * 2 ** min(attempt - 1, 9), _LONGEST_PAUSE))
                continue
            if attempt > 1:
                seconds = time.monotonic() - began
                self.said.append(
                    f"{what} took {attempt} attempts in {seconds:.0f} s, the last failure: {reason}"
                )
            return value
        raise AssertionError("attempts do not end")


def _digest(file: Any) -> bytes:
    digest = hashlib.sha256()
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.digest()


def is_remote(directory: Any) -> bool:
    """Whether a directory is a URL: "s3://bucket/run"; "file:///runs/1" is an ordinary path."""
    return isinstance(directory, str) and "://" in places.as_path(directory)


def read_config(directory: str, argument: str) -> str:
    """The text of config.json in a directory, a local or a remote one.

    Raises:
        OSError, UnicodeDecodeError: there is none.
        ValueError: the remote one cannot be reached; says so by the argument's name.
    """
    if not is_remote(directory):
        return (Path(directory) / run_dir.CONFIG).read_text(encoding="utf-8")
    try:
        return RemoteFiles(directory, argument).read(run_dir.CONFIG).decode()
    except FileNotFoundError as error:
        raise FileNotFoundError(2, os.strerror(2)) from error
    except UnreachableError as error:
        raise ValueError(f"{argument} ({directory}) cannot be reached: {error}.") from None


def holds_run(directory: str, argument: str = "run_dir") -> bool:
    """Whether there is a config.json in a directory, a local or a remote one.

    Raises:
        ValueError: the remote one cannot be reached; says so by the argument's name.
    """
    try:
        read_config(directory, argument)
    except (OSError, UnicodeDecodeError):
        return False
    return True
