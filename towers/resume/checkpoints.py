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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from towers.resume.run_dir import flush_to_disk

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "arrays.bin"
NEWEST_KEPT = 3

_NAME = re.compile(r"epoch-([0-9]{1,18})-step-([0-9]{1,18})")
LARGEST_MANIFEST = 2**26  # bytes: far above what a million epochs' results need


class Checkpoint(NamedTuple):
    """The contents of a checkpoint.

    state: plain JSON values.
    arrays: by name, in the order they were saved.
    """

    state: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Found(NamedTuple):
    """A checkpoint that has been read; damaged: what is wrong with each newer one."""

    path: Path
    checkpoint: Checkpoint
    damaged: list[str]


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
            "arrays": [
                [name, value.dtype.name, list(value.shape)]
                for name, value in checkpoint.arrays.items()
            ],
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
    name = MANIFEST
    try:
        if (path / MANIFEST).stat().st_size > LARGEST_MANIFEST:
            raise DamagedError(f"{MANIFEST} is too large")
        content = _content(path, (path / MANIFEST).read_bytes())
        name = ARRAYS
        with (path / ARRAYS).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
    except OSError as error:
        raise DamagedError(f"{name} cannot be read: {error.strerror}") from None
    return _checkpoint(content, data)


def received(path: Path, manifest: bytes, data: bytes) -> Checkpoint:
    """The checkpoint of another worker's files; Args: their contents. Raises: as `read`."""
    return _checkpoint(_content(path, manifest), data)


def read_newest(directory: Path) -> Found | None:
    """The newest good checkpoint, if any.

    Raises:
        ValueError: there are checkpoints, but all are damaged; or one is of a newer version.
    """
    wrong: list[str] = []
    for path in find(directory):
        try:
            return Found(path, read(path), wrong)
        except DamagedError as error:
            wrong.append(f"{path} is damaged: {error}")
    if wrong:
        raise ValueError(
            f"no checkpoint is good: {'; '.join(wrong)}. Nothing was changed. Put a copy of one "
            "back, or start a new run in another directory."
        )
    return None


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


def _content(path: Path, text: bytes) -> dict[str, Any]:
    """What the manifest of a checkpoint says, once it is known to be what was written."""
    try:
        manifest = json.loads(text)
        content = manifest["content"]
        if manifest["sha256"] != _digest(json.dumps(content, sort_keys=True)):
            raise DamagedError(f"{MANIFEST} is not what was written: its SHA-256 differs")
        version = content["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{MANIFEST} is garbage") from None
    if type(version) is int and version > FORMAT:
        raise ValueError(
            f"{path} has format {version}, and this version of towers reads {FORMAT}: "
            "resume with the version that wrote it, or a newer one."
        )
    kinds = {"state": dict, "arrays": list, "size": int, "sha256": str}
    is_whole = all(isinstance(content.get(name), kind) for name, kind in kinds.items())
    if version != FORMAT or not is_whole:
        raise DamagedError(f"{MANIFEST} is garbage")
    return content


def _checkpoint(content: dict[str, Any], data: bytes | mmap.mmap) -> Checkpoint:
    if len(data) != content["size"]:
        raise DamagedError(f"{ARRAYS} has {len(data):,} bytes instead of {content['size']:,}")
    if hashlib.sha256(data).hexdigest() != content["sha256"]:
        raise DamagedError(f"{ARRAYS} is not what was written: its SHA-256 differs")
    return Checkpoint(content["state"], dict(_cut(data, content["arrays"])))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _cut(data: bytes | mmap.mmap, entries: list) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays that lie in `data` one after the other; entries: [name, dtype, shape]."""
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
