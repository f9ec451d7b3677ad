"""Checkpoints: directories that hold the complete state of a run.

    checkpoints/
        lock                    held by the process that trains here
        epoch-3-step-1502/      three complete epochs, 1,502 updates
            manifest.json       {"content": {format, state, arrays, size, sha256}, "sha256": ...}
            arrays.bin          the values of all arrays, one after the other

The format is one raw file beside JSON. It holds no code, takes any dtype (bfloat16 too), and needs
no more memory than its size. The manifest holds the SHA-256 of `arrays.bin` and of the manifest's
content. A checkpoint is written atomically and read back; only then is an older one removed.
"""

import hashlib
import json
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from towers.machine import files
from towers.resume import directories

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "arrays.bin"
NEWEST_KEPT = 3

_DTYPE = re.compile("[a-z][a-z0-9_]*")  # other texts are programs for numpy.dtype
_NAME = re.compile(r"epoch-([0-9]{1,18})-step-([0-9]{1,18})")
LARGEST_MANIFEST = 2**26  # bytes; the results of a million epochs need far less


class Checkpoint(NamedTuple):
    """Holds plain JSON values by name, and arrays by name in the order in which they were saved."""

    state: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Found(NamedTuple):
    """Holds a checkpoint that was read. damaged: one error line for each newer checkpoint."""

    path: Path
    checkpoint: Checkpoint
    damaged: list[str]


class DamagedError(Exception):
    """An error whose message says why a checkpoint cannot be read."""


def path_of(directory: Path, epoch: int, step: int) -> Path:
    """Returns the path of the checkpoint after `epoch` complete epochs and `step` updates."""
    return directory / f"epoch-{epoch}-step-{step}"


def step_of(path: Path) -> int:
    """Returns the number of updates from the name of a checkpoint."""
    return _order(path)[0]


def find(directory: Path) -> list[Path]:
    """Returns all checkpoints of a directory, also damaged ones, with the newest first."""
    if directory.is_dir():
        return ordered(directory.iterdir())[::-1]
    return []


def ordered(paths: Iterable[Path]) -> list[Path]:
    """Returns the paths whose names are names of checkpoints, with the oldest first."""
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_order)


def outdated(
    paths: Iterable[Path], newest: Path, best_step: int | None, keep: int = NEWEST_KEPT
) -> list[Path]:
    """Returns the checkpoints to remove: all except the newest `keep` and the best."""
    # `newest` has just been written, so checkpoints of later steps are damaged: ignore them.
    known = [path for path in ordered(paths) if _order(path) <= _order(newest)]
    return [path for path in known[:-keep] if step_of(path) != best_step]


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint so that `path` is either complete and on the disk, or does not exist.

    A good checkpoint of this name is kept, because a run has only one state at each step. A
    checkpoint that cannot be read back is removed, and raises DamagedError.
    """
    if not is_good(path):
        directories.remove(path)
        directories.write_atomically(path, partial(_write_files, checkpoint))


def _write_files(checkpoint: Checkpoint, directory: Path) -> None:
    directory.mkdir()
    content = {
        "format": FORMAT,
        "state": checkpoint.state,
        "arrays": [[name, v.dtype.name, list(v.shape)] for name, v in checkpoint.arrays.items()],
        **_write_arrays(directory / ARRAYS, checkpoint.arrays),
    }
    text = json.dumps(content, sort_keys=True)
    manifest = f'{{"content": {text}, "sha256": "{_sha256(text.encode())}"}}'
    (directory / MANIFEST).write_bytes(manifest.encode())
    directories.flush_to_disk(directory / MANIFEST)
    read(directory)


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, int | str]:
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for array in arrays.values():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            file.write(data)
            digest.update(data)
        size = file.tell()
    directories.flush_to_disk(path)
    return {"size": size, "sha256": digest.hexdigest()}


def read(path: Path) -> Checkpoint:
    """Reads a checkpoint and checks its digests. The arrays are views of the memory-mapped file.

    Raises DamagedError if something differs, ValueError if a newer version of towers wrote it.
    """
    name = "the directory"
    try:
        files.check_link(path)
        name = MANIFEST
        manifest = files.read(path / MANIFEST, LARGEST_MANIFEST)
        name = ARRAYS
        with files.open_to_read(path / ARRAYS) as file:
            size = os.fstat(file.fileno()).st_size
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
    except OSError as error:
        raise DamagedError(f"{name} cannot be read: {error.strerror}") from None
    return from_bytes(path, manifest, data)


def from_bytes(path: Path, manifest: bytes, data: bytes | mmap.mmap) -> Checkpoint:
    """Makes a checkpoint of the bytes of its two files. Raises the errors of `read`."""
    try:
        held = json.loads(manifest)
        content = held["content"]
        if held["sha256"] != _sha256(json.dumps(content, sort_keys=True).encode()):
            raise DamagedError(f"{MANIFEST} is not what was written: its SHA-256 differs")
        version = content["format"]
        state, arrays, size, digest = _entries(content) if version == FORMAT else ({}, [], 0, "")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{MANIFEST} is garbage") from None
    if version != FORMAT:
        raise ValueError(
            f"{path} has format {version}, and this version of towers reads {FORMAT}: "
            "resume with the version that wrote it, or a newer one."
        )
    if len(data) != size:
        raise DamagedError(f"{ARRAYS} has {len(data):,} bytes instead of {size:,}")
    if _sha256(data) != digest:
        raise DamagedError(f"{ARRAYS} is not what was written: its SHA-256 differs")
    return Checkpoint(state, dict(_cut(data, arrays)))


def _entries(content: dict[str, Any]) -> tuple[dict[str, Any], list, int, str]:
    """Returns the entries of a manifest; raises DamagedError if one is missing or is wrong."""
    kinds = {"state": dict, "arrays": list, "size": int, "sha256": str}
    for name, kind in kinds.items():
        if type(content.get(name)) is not kind:
            raise DamagedError(f"{MANIFEST} lacks a valid {name!r}")
    return content["state"], content["arrays"], content["size"], content["sha256"]


def _cut(data: bytes | mmap.mmap, entries: list) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays that `data` holds one after the other. Entries: [name, dtype, shape]."""
    begin = 0
    try:
        for name, dtype_name, shape in entries:
            if not _DTYPE.fullmatch(dtype_name):
                raise ValueError(dtype_name)
            dtype = np.dtype(getattr(ml_dtypes, dtype_name, dtype_name))
            count = math.prod(shape)
            end = begin + count * dtype.itemsize
            # An array of Python objects could run code.
            is_plain = dtype.itemsize > 0 and not dtype.hasobject
            if not is_plain or end > len(data) or any(type(n) is not int or n < 0 for n in shape):
                raise ValueError(name)
            yield str(name), np.frombuffer(data, dtype, count, begin).reshape(shape)
            begin = end
    except (ValueError, TypeError, AttributeError):
        raise DamagedError(f"{MANIFEST} lists arrays that {ARRAYS} does not hold") from None
    if begin != len(data):
        raise DamagedError(f"{ARRAYS} holds more than {MANIFEST} lists")


def read_newest(directory: Path) -> Found | None:
    """Reads the newest good checkpoint; None without checkpoints, ValueError if none is good."""
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
    """Returns whether `read` can read the checkpoint."""
    try:
        read(path)
    except (DamagedError, ValueError):
        return False
    return True


def prune(newest: Path, best_step: int | None, keep: int = NEWEST_KEPT) -> None:
    """Removes the checkpoints that are `outdated`, and temporary files of interrupted writes."""
    directories.remove_temporary_files(newest.parent)
    for path in outdated(find(newest.parent), newest, best_step, keep):
        # The manifest goes first: a removal that is interrupted then leaves no checkpoint.
        if not path.is_symlink():
            (path / MANIFEST).unlink(missing_ok=True)
        directories.remove(path)


def json_copy(value: object) -> Any:
    """Copies JSON values: tuples become lists, keys become text, other types raise ValueError."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(str(error)) from None


def is_finite(array: np.ndarray) -> bool:
    """Returns whether no value is NaN or infinite."""
    return array.dtype.kind in "iub" or bool(np.isfinite(array).all())


def _order(path: Path) -> tuple[int, int]:
    """Returns the step and the epoch from the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[2]), int(match[1])


def _sha256(data: bytes | mmap.mmap) -> str:
    return hashlib.sha256(data).hexdigest()
