"""Keeps a local copy of a run directory behind an fsspec URL, and uploads its changes.

    s3://bucket/run                     the copy, in a new temporary directory
        config.json, log.txt, ...  <--  changed files, when a checkpoint is complete
        checkpoints/
            lock                   <--  names the last process that began; only it writes
            epoch-3-step-1502/
                arrays.bin         <--  after these files
                manifest.json      <--  then this, which makes it a checkpoint
            complete               <--  then, at the end of a run
            epoch-2-step-1001/          an older one is removed only now

Files beside a checkpoint are never older than the checkpoint, as on a local disk. A run that
resumes from the checkpoint replaces newer files.
"""

import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from towers.machine.places import LostDirectoryError
from towers.resume import checkpoints, directories

_LOCK = f"{directories.CHECKPOINTS}/{directories.LOCK}"
_ORDER = {checkpoints.ARRAYS: 1, checkpoints.MANIFEST: 2, directories.COMPLETE: 3}


class Mirror:
    """Uploads changes of a local copy to a remote directory.

    copy: the directory on the local disk. If there is nothing to download, the caller makes it.
    found: the names of the files that the remote directory held at first. is_behind: it lacks
        changes. is_taken: another process trains in it.
    """

    def __init__(self, url: str, argument: str, parent: Path) -> None:
        self.url, self._argument, self._files = url, argument, directories.open_remote(url)
        self.copy = parent / (directories.file_name(url.rstrip("/").rsplit("/", 1)[-1]) or "run")
        self._owner = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex}"
        self._lock = parent / directories.LOCK
        self._has_claimed = self.is_taken = self.is_behind = False
        self.found: list[str] = []
        self._sent: dict[Path, tuple[int, int]] = {}  # uploaded versions: time, size

    def claim(self) -> None:
        """Takes the remote directory. Raises OSError if another process has taken it since."""
        if not self._has_claimed:
            self._lock.write_text(self._owner, encoding="utf-8")
            self._files.put_file(str(self._lock), _LOCK)  # this makes the folder, too
            self._has_claimed = True
        owner = self._files.cat_file(_LOCK).decode(errors="replace")
        if owner != self._owner:
            self.is_taken = True
            raise OSError(f"{owner.rpartition(',')[0]} trains there now")

    def names(self) -> list[str]:
        """Returns the names of the remote files, except the lock.

        A name with ".." would lead out of the copy, so it is left out.
        """
        self._files.invalidate_cache()
        found = self._files.find("")
        return [name for name in found if name != _LOCK and ".." not in Path(name).parts]

    def download(self, names: list[str]) -> None:
        """Downloads the files beside the checkpoints, and checkpoints up to the newest good one."""
        for folder in (Path(), Path(directories.CHECKPOINTS), *reversed(_complete(names))):
            (self.copy / folder).mkdir(parents=True, exist_ok=True)
            for name in names:
                if Path(name).parent == folder:
                    self._files.get_file(name, str(self.copy / name))
                    self._sent[self.copy / name] = _version(self.copy / name)
            if checkpoints.is_good(self.copy / folder):
                break

    def upload(
        self,
        newest: Path | None = None,
        best_step: int | None = None,
        keep: int = checkpoints.NEWEST_KEPT,
    ) -> None:
        """Uploads all changes. After a new checkpoint, removes outdated remote checkpoints.

        newest: the checkpoint in the copy that has just been written. best_step: is kept, too, as
            are the newest `keep` checkpoints.

        Raises LostDirectoryError if the upload is not complete. The next call tries again.
        """
        self.is_behind = True
        try:
            versions = {}
            for path in self.copy.rglob("*"):
                is_kept = path.name == directories.LOCK or path.name.startswith(".")
                with suppress(FileNotFoundError):  # a temporary file may vanish
                    if path.is_file() and not is_kept and self._sent.get(path) != _version(path):
                        versions[path] = _version(path)
            if versions:
                self.claim()
            # Settings, which are JSON, come before all that depends on them.
            first = sorted(versions, key=lambda path: path.suffix != ".json")
            for path in sorted(first, key=lambda path: _ORDER.get(path.name, 0)):
                self._files.put_file(str(path), path.relative_to(self.copy).as_posix())
                self._sent[path] = versions[path]
            if newest is not None:  # this includes checkpoints whose upload was interrupted
                names = self.names()
                complete = _complete(names)
                newest = newest.relative_to(self.copy)
                old = checkpoints.outdated(complete, newest, best_step, keep)
                kept = {*complete} - {*old}
                for folder in checkpoints.ordered({Path(name).parent for name in names} - kept):
                    self._files.rm(folder.as_posix(), recursive=True)
        except Exception as error:  # each protocol's package raises different errors
            name = "resume" if self._argument == "run_dir" else self._argument
            raise LostDirectoryError(
                f"{self.url} cannot be written: {directories.reason(error)}. All that it lacks is in "
                f"{self.copy}: continue with {name}={self.copy}."
            ) from error
        self.is_behind = False


@contextmanager
def mirrored(
    directory: str | None, warn: Callable[[str], None], *, resume: bool, argument: str = "run_dir"
) -> Iterator[Mirror | None]:
    """Gives a `Mirror` of a remote directory, and uploads it at the end; None for a local one.

    resume: whether to download the files that are there.

    Raises LostDirectoryError if an upload failed. The copy is kept, and the message names it.
    """
    if not directories.is_remote(directory):
        yield None
        return
    url, parent = str(directory), Path(tempfile.mkdtemp(prefix="towers-"))
    mirror = None
    try:
        with directories.explained(url, argument):
            mirror = Mirror(url, argument, parent)
            mirror.found = mirror.names()
            if not mirror.found:
                mirror.claim()
            elif resume:
                mirror.download(mirror.found)
        try:
            yield mirror
        except BaseException as error:
            if type(error) is ValueError:  # the message may name the copy
                error.args = (str(error).replace(str(mirror.copy), url),)
            try:
                mirror.upload()
            except LostDirectoryError as lost:  # the first error is raised instead
                warn(str(lost))
            raise
        mirror.upload()
    finally:
        if mirror is None or not mirror.is_behind:
            shutil.rmtree(parent, ignore_errors=True)


def _complete(names: list[str]) -> list[Path]:
    """Returns the directories of checkpoints that have a manifest, with the oldest first."""
    manifests = [name for name in names if name.endswith(checkpoints.MANIFEST)]
    return checkpoints.ordered(Path(name).parent for name in manifests)


def _version(path: Path) -> tuple[int, int]:
    return path.stat().st_mtime_ns, path.stat().st_size
