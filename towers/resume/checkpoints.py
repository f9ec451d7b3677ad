"""Checkpoints: directories that hold all of a run's state, whole or not at all.

    checkpoints/
        lock                    held by the process that trains here
        epoch-3-step-1502/      three complete epochs, 1,502 updates
            manifest.json       {"content": {format, state, arrays, size, sha256}, "sha256": ...}
            arrays.bin          the values of all arrays, one after the other

One raw file beside JSON: nothing in it can run, any dtype fits (bfloat16 too), and it cannot ask
for more memory than its own size. The manifest carries the SHA-256 of `arrays.bin` and of its own
content. A checkpoint is written under a temporary name, flushed to the disk, read back, and
renamed; only then is an older one removed.
"""

import hashlib
import json
import math
import mmap
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from towers.machine.places import LostDirectoryError
from towers.resume.run_dir import flush_to_disk

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "arrays.bin"
NEWEST_KEPT = 3

_NAME = re.compile(r"epoch-([0-9]{1,18})-step-([0-9]{1,18})")
_SIZE_BYTES = 8
LARGEST_MANIFEST = 2**26  # bytes: far above what a million epochs' results need


class Checkpoint(NamedTuple):
    """The contents of a checkpoint.

    state: plain JSON values.
    arrays: by name, in the order they were saved.
    """

    state: dict[str, Any]
    arrays: dict[str, np.ndarray]


class DamagedError(Exception):
    """A checkpoint cannot be read; the message says why."""


def path_of(directory: Path, epoch: int, step: int) -> Path:
    """The path of the checkpoint after `epoch` complete epochs and `step` updates."""
    return directory / f"epoch-{epoch}-step-{step}"


def step_of(path: Path) -> int:
    """The updates that a checkpoint's name says."""
    return _order(path)[0]


def find(directory: Path) -> list[Path]:
    """All checkpoints of a directory, the newest first; damaged ones too."""
    if not directory.is_dir():
        return []
    return ordered(directory.iterdir())[::-1]


def ordered(paths: Iterable[Path]) -> list[Path]:
    """Those of some paths whose names are of checkpoints, the oldest first."""
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_order)


def outdated(paths: Iterable[Path], newest: Path, best_step: int | None) -> list[Path]:
    """Those of a directory's checkpoints that are not kept: all but the newest 3 and the best.

    What lies beyond `newest`, which has just been written, was found damaged: it does not count.
    """
    known = [path for path in ordered(paths) if _order(path) <= _order(newest)]
    return [path for path in known[:-NEWEST_KEPT] if step_of(path) != best_step]


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint so that `path` is either complete and on the disk, or not there.

    A complete one of the same name is left alone: a run comes to a step in one state only. A
    damaged one is replaced.

    Raises:
        OSError: it cannot be written; nothing is left of it.
        DamagedError: it would not be read again; nothing is left of it.
    """
    if path.exists():
        if is_good(path):
            return
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        content = {
            "format": FORMAT,
            "state": checkpoint.state,
            "arrays": _listed(checkpoint.arrays),
            **_write_arrays(temporary / ARRAYS, checkpoint.arrays),
        }
        (temporary / MANIFEST).write_bytes(_manifest(content))
        flush_to_disk(temporary / MANIFEST)
        flush_to_disk(temporary)
        read(temporary)
        os.rename(temporary, path)
        flush_to_disk(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read(path: Path) -> Checkpoint:
    """A checkpoint, every byte of it checked; its arrays lie in the file's pages, not in memory.

    Raises:
        DamagedError: something is missing, or is not what was written.
        ValueError: a newer version of towers wrote it.
    """
    content = _read_manifest(path / MANIFEST)
    try:
        with (path / ARRAYS).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
    except OSError as error:
        raise DamagedError(f"{ARRAYS} cannot be read: {error.strerror}") from None
    if size != content["size"]:
        raise DamagedError(f"{ARRAYS} has {size:,} bytes instead of {content['size']:,}")
    if hashlib.sha256(data).hexdigest() != content["sha256"]:
        raise DamagedError(f"{ARRAYS} is not what was written: its SHA-256 differs")
    return Checkpoint(content["state"], dict(_cut(data, content["arrays"])))


def read_newest(directory: Path) -> tuple[Path, Checkpoint, list[str]] | None:
    """The newest good checkpoint: (path, contents, what is wrong with each newer one), if any.

    Raises:
        ValueError: there are checkpoints, but all are damaged; or one is of a newer version.
    """
    wrong: list[str] = []
    for path in find(directory):
        try:
            return path, read(path), wrong
        except DamagedError as error:
            wrong.append(f"{path} is damaged: {error}")
    if wrong:
        raise ValueError(
            f"no checkpoint is good: {'; '.join(wrong)}. Nothing was changed. Put a copy of one "
            "back, or start a new run in another directory."
        )
    return None


def to_bytes(checkpoint: Checkpoint) -> bytes:
    """A checkpoint for another worker: the size of its JSON, that, and the arrays' values."""
    listed = _listed(checkpoint.arrays)
    header = json.dumps({"state": checkpoint.state, "arrays": listed}).encode()
    values = [np.ascontiguousarray(array).tobytes() for array in checkpoint.arrays.values()]
    return b"".join([len(header).to_bytes(_SIZE_BYTES, "little"), header, *values])


def from_bytes(data: bytes) -> Checkpoint:
    """The checkpoint that `to_bytes` was given."""
    end = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "little")
    header = json.loads(data[_SIZE_BYTES:end])
    return Checkpoint(header["state"], dict(_cut(data[end:], header["arrays"])))


def is_good(path: Path) -> bool:
    """Whether `read` would read it."""
    try:
        read(path)
    except (DamagedError, ValueError):
        return False
    return True


def prune(directory: Path, newest: Path, best_step: int | None) -> None:
    """Removes what is `outdated`, and what interrupted writes have left."""
    for path in directory.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for path in outdated(find(directory), newest, best_step):
        # Without its manifest it is no checkpoint any more, however far the removal gets.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


class Writer:
    """Writes checkpoints in a thread of its own, one at a time, and tidies up after each."""

    def __init__(
        self,
        warn: Callable[[str], None],
        written: Callable[[Path, int | None], None] | None = None,
    ) -> None:
        """
        Args:
            warn: called in the caller's thread, when a write has failed.
            written: called in the writer's, when one has gone well, with the arguments of `write`;
                may raise LostDirectoryError.
        """
        self._warn, self._written = warn, written
        self._thread: threading.Thread | None = None
        self._fault: str | None = None

    def write(self, path: Path, checkpoint: Checkpoint, best_step: int | None) -> None:
        """Begins to write; waits only for the write before it.

        The state is copied at once: it may hold lists that grow while training goes on. The arrays
        are copies already, and must not change.
        """
        self.wait()
        try:
            checkpoint = checkpoint._replace(state=json_copy(checkpoint.state))
        except ValueError as error:
            self._fault = f"{path} is not written: what it would hold is no JSON ({error})"
            return
        self._thread = threading.Thread(
            target=self._write, args=(path, checkpoint, best_step), daemon=True
        )
        self._thread.start()

    def wait(self) -> bool:
        """Waits until nothing is being written; whether the last write went well."""
        fault = self.fault()
        if fault is not None:
            self._warn(f"{fault}; training goes on.")
        return fault is None

    def fault(self) -> str | None:
        """Waits likewise; why the last write failed, which nobody is warned of then."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        fault, self._fault = self._fault, None
        return fault

    def _write(self, path: Path, checkpoint: Checkpoint, best_step: int | None) -> None:
        try:
            name = first_not_finite(checkpoint.arrays)
            if name is not None:
                self._fault = f"{path} is not written: {name} holds NaN or infinite values"
                return
            write(path, checkpoint)
            prune(path.parent, path, best_step)
            if self._written is not None:
                self._written(path, best_step)
        except OSError as error:
            self._fault = f"{path} cannot be written ({error.strerror})"
        except DamagedError as error:
            self._fault = f"{path} is not written, as it could not be read: {error}"
        except LostDirectoryError as error:
            self._fault = str(error).rstrip(".")
        except Exception as error:  # nobody else would see it
            self._fault = f"{path} cannot be written ({error!r})"


def json_copy(value: Any) -> Any:
    """A copy of JSON values as JSON brings them back: lists for tuples, and text for keys.

    Raises:
        ValueError: something in it is no JSON value.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(str(error)) from None


def first_not_finite(arrays: Mapping[str, np.ndarray]) -> str | None:
    """The name of the first model variable that holds NaN or infinite values."""
    for name, array in arrays.items():
        if name.startswith("model/") and not is_finite(array):
            return name.removeprefix("model/")
    return None


def is_finite(array: np.ndarray) -> bool:
    """Whether no value is NaN or infinite."""
    return array.dtype.kind in "iub" or bool(np.isfinite(array).all())


def _order(path: Path) -> tuple[int, int]:
    """The step and the epoch of a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[2]), int(match[1])


def _manifest(content: dict[str, Any]) -> bytes:
    """The manifest's text, with the digest of the very text that stands in it."""
    text = json.dumps(content, sort_keys=True)
    return f'{{"content": {text}, "sha256": "{_digest(text)}"}}'.encode()


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for array in arrays.values():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            file.write(data)
            digest.update(data)
        size = file.tell()
    flush_to_disk(path)
    return {"size": size, "sha256": digest.hexdigest()}


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_MANIFEST:
            raise DamagedError(f"{MANIFEST} is too large")
        manifest = json.loads(path.read_bytes())
        content = manifest["content"]
        if manifest["sha256"] != _digest(json.dumps(content, sort_keys=True)):
            raise DamagedError(f"{MANIFEST} is not what was written: its SHA-256 differs")
        version = content["format"]
    except OSError as error:
        raise DamagedError(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{MANIFEST} is garbage") from None
    if type(version) is int and version > FORMAT:
        raise ValueError(
            f"{path.parent} has format {version}, and this version of towers reads {FORMAT}: "
            "resume with the version that wrote it, or a newer one."
        )
    kinds = {"state": dict, "arrays": list, "size": int, "sha256": str}
    is_whole = all(isinstance(content.get(name), kind) for name, kind in kinds.items())
    if version != FORMAT or not is_whole:
        raise DamagedError(f"{MANIFEST} is garbage")
    return content


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _listed(arrays: Mapping[str, np.ndarray]) -> list[Any]:
    """The entries that `_cut` takes: [name, dtype, shape]."""
    return [[name, value.dtype.name, list(value.shape)] for name, value in arrays.items()]


def _cut(data: bytes | mmap.mmap, entries: list) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays that lie in `data` one after the other."""
    begin = 0
    try:
        for name, dtype_name, shape in entries:
            dtype = _dtype(dtype_name)
            count = math.prod(shape)
            end = begin + count * dtype.itemsize
            if end > len(data) or any(type(n) is not int or n < 0 for n in shape):
                raise ValueError(name)
            yield str(name), np.frombuffer(data, dtype, count, begin).reshape(shape)
            begin = end
    except (ValueError, TypeError, AttributeError):
        raise DamagedError(f"{MANIFEST} lists arrays that {ARRAYS} does not hold") from None
    if begin != len(data):
        raise DamagedError(f"{ARRAYS} holds more than {MANIFEST} lists")


def _dtype(name: str) -> np.dtype:
    """A dtype of plain numbers: never Python objects."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(name)
    return dtype
