"""A run directory where fsspec reaches: a local copy takes its place, and a thread uploads it.

    s3://bucket/run                     the copy, in a new temporary directory
        config.json, log.txt, ...  <--  those that have changed, when a checkpoint is complete
        checkpoints/
            lock                   <--  whose it is: the process that has begun last
            epoch-3-step-1502/
                arrays.bin         <--  after these files, and read back
                manifest.json      <--  then this, which makes it a checkpoint, and read back
            epoch-2-step-1001/          an older one is removed only now
            complete               <--  last

What lies beside a checkpoint is never older than it, as on a local disk: a run that goes on from
it replaces what is newer. A lost connection is tried again; one that is lost for good ends the run,
and the copy stays.
"""

import os
import shutil
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from towers.resume import checkpoints, run_dir
from towers.resume.remote_files import RemoteFiles, UnreachableError, is_remote
from towers.machine.places import LostDirectoryError

GIVE_UP_SECONDS = 300.0  # how long a lost connection is tried again; `watch` has as much patience
_LOCK = f"{run_dir.CHECKPOINTS}/{run_dir.LOCK}"


class Mirror:
    """The local copy of a remote directory, and the thread that uploads what changes there.

    copy: the directory on the local disk; a caller makes it where there is nothing to download.
    fault: why nothing is uploaded any more, with the way out; None while all is well.
    """

    def __init__(self, url: str, argument: str, goes_on: str, parent: Path) -> None:
        """
        Args:
            url: of the remote directory.
            argument: what the user calls it.
            goes_on: the argument that goes on with a local directory.
            parent: a new directory on the local disk, for the copy and for what is on its way.

        Raises:
            ValueError: a package is missing, or nothing is known of such a URL.
        """
        self._files, self._url = RemoteFiles(url, argument), url
        self._argument, self._goes_on = argument, goes_on
        self.copy = parent / (run_dir.file_name(url.rstrip("/").rsplit("/", 1)[-1]) or "run")
        self._outgoing = parent / ".outgoing"
        self._owner = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex}"
        self._is_claimed, self._is_told = False, False
        self._sent: dict[Path, tuple[int, int] | None] = {}  # what is there: (time, size)
        self._sent_checkpoint: Path | None = None
        self._written: tuple[Path, int | None] | None = None  # the newest one, the best one's step
        self._thread: threading.Thread | None = None
        self._is_due, self._guard = False, threading.Lock()
        self.fault: str | None = None
        self._reason = ""

    @property
    def shown(self) -> str:
        """The directory to go on from: the remote one, or the copy where that could not be sent."""
        return self._url if self.fault is None else str(self.copy)

    def check_empty(self) -> None:
        """Raises ValueError where a new run cannot begin, as something is there or nobody answers.
        """
        with self._explained():
            names = [name for name in self._files.names() if name != _LOCK]
        if run_dir.CONFIG in names:
            raise ValueError(
                f"{self._argument} ({self._url}) holds a run. To continue it: resume={self._url}; "
                "for a new run, name another directory."
            )
        if names:
            raise ValueError(
                f"{self._argument} ({self._url}) is not empty; name a new directory or an empty "
                "one."
            )

    def download(self) -> None:
        """Copies the files beside the checkpoints, and the newest good checkpoint.

        Newer ones, which are damaged, are copied too: who reads them says what is wrong.

        Raises:
            ValueError: nobody answers.
        """
        with self._explained():
            names = self._files.names()
            (self.copy / run_dir.CHECKPOINTS).mkdir(parents=True)
            for name in names:
                folder, _, file = name.rpartition("/")
                if folder in ("", run_dir.CHECKPOINTS) and name != _LOCK and _is_visible(file):
                    self._files.get(name, self.copy / name)
                    self._sent[self.copy / name] = _version(self.copy / name)
            for path in reversed(_complete(names)):
                local = self.copy / run_dir.CHECKPOINTS / path.name
                local.mkdir()
                for file in (checkpoints.MANIFEST, checkpoints.ARRAYS):
                    with suppress(FileNotFoundError):
                        self._files.get(f"{path}/{file}", local / file)
                if checkpoints.is_good(local):
                    break
        self._files.patience = GIVE_UP_SECONDS

    def send(self, path: Path, best_step: int | None) -> None:
        """Begins to upload what has changed; the caller goes on.

        Args:
            path: of a checkpoint in the copy that has just been written.
            best_step: of the best checkpoint, which stays.
        """
        self._written = (path, best_step)
        self._begin()

    def wait(self) -> None:
        """Waits until nothing is on its way."""
        while (thread := self._thread) is not None:
            thread.join()

    def wait_first(self) -> None:
        """Waits for the first checkpoint of a new run.

        Raises:
            ValueError: it is not there; the copy is removed.
        """
        self.wait()
        if self.fault is not None:
            self._is_told = True
            shutil.rmtree(self.copy, ignore_errors=True)
            raise ValueError(f"{self._argument} ({self._url}) cannot be used: {self._reason}.")
        self._files.patience = GIVE_UP_SECONDS

    def tell(self, warn: Callable[[str], None]) -> None:
        """Says in one line each how often, and how long, a lost connection was tried again."""
        while self._files.said:
            warn(f"{self._url}: {self._files.said.pop(0)}.")

    def check(self) -> None:
        """Raises LostDirectoryError, once, where nothing is uploaded any more."""
        if self.fault is not None and not self._is_told:
            self._is_told = True
            raise LostDirectoryError(self.fault)

    def finish(self) -> None:
        """Uploads what has changed since, and waits for it."""
        self._begin()
        self.wait()

    def _begin(self) -> None:
        with self._guard:
            self._is_due = True
            if self._thread is None and self.fault is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """Uploads until nothing is due; checkpoints that come meanwhile are one pass together."""
        while True:
            with self._guard:
                if not self._is_due or self.fault is not None:
                    self._thread = None
                    return
                self._is_due = False
            try:
                self._upload()
            except Exception as error:  # nobody else would see it
                self._reason = str(error) if str(error) else repr(error)
                self.fault = (
                    f"{self._url} is no longer written: {self._reason}. All that it lacks is in "
                    f"{self.copy}: go on with {self._goes_on}={self.copy}."
                )

    def _upload(self) -> None:
        """One pass; the checkpoint is held first, and what lies beside it uploaded first."""
        written = self._written
        is_new = written is not None and written[0] != self._sent_checkpoint
        last, others = self._changed(run_dir.CHECKPOINTS), self._changed("")
        if not is_new and not last and not others:
            return
        shutil.rmtree(self._outgoing, ignore_errors=True)
        self._outgoing.mkdir()
        if is_new and written is not None:  # links: the copy's may be removed meanwhile
            for file in (checkpoints.ARRAYS, checkpoints.MANIFEST):
                os.link(written[0] / file, self._outgoing / file)
        self._check_owner()
        self._send_files(others)
        if is_new and written is not None:
            self._send_checkpoint(*written)
        self._send_files(last)

    def _changed(self, folder: str) -> list[Path]:
        """The files of the copy to upload, config.json first: a run without it is none.

        Args:
            folder: checkpoints/, without what is in its folders; or "", for all others.
        """
        found: list[Path] = []
        for place, folders, files in os.walk(self.copy / folder):  # some may go meanwhile
            if folder:
                folders.clear()
            elif run_dir.CHECKPOINTS in folders:
                folders.remove(run_dir.CHECKPOINTS)
            found += [Path(place, name) for name in files if name != run_dir.LOCK]
        changed = [
            path for path in found
            if _is_visible(path.name) and _version(path) not in (None, self._sent.get(path))
        ]
        return sorted(changed, key=lambda path: (path.name != run_dir.CONFIG, path))

    def _check_owner(self) -> None:
        """Takes the remote directory; later refuses one that another process has taken since."""
        if not self._is_claimed:
            (self._outgoing / run_dir.LOCK).write_text(self._owner, encoding="utf-8")
            self._files.put(self._outgoing / run_dir.LOCK, _LOCK)
            self._is_claimed = True
            return
        try:
            owner = self._files.read(_LOCK).decode(errors="replace")
        except FileNotFoundError:
            raise UnreachableError(f"its {_LOCK} was removed") from None
        if owner != self._owner:
            raise UnreachableError(f"{owner.rpartition(',')[0]} trains there now")

    def _send_files(self, paths: list[Path]) -> None:
        for path in paths:
            version, taken = _version(path), self._outgoing / "file"
            try:
                shutil.copyfile(path, taken)  # it may grow meanwhile
            except FileNotFoundError:
                continue
            self._files.put(taken, path.relative_to(self.copy).as_posix())
            self._sent[path] = version

    def _send_checkpoint(self, path: Path, best_step: int | None) -> None:
        """Uploads a checkpoint; then removes those that it makes superfluous."""
        folder = f"{run_dir.CHECKPOINTS}/{path.name}"
        self._files.remove(f"{folder}/{checkpoints.MANIFEST}")  # of a damaged one of its name
        for file in (checkpoints.ARRAYS, checkpoints.MANIFEST):
            self._files.put(self._outgoing / file, f"{folder}/{file}", is_read_back=True)
            (self._outgoing / file).unlink()  # the copy may have removed its own
        self._sent_checkpoint = path
        names = self._files.names()
        complete = _complete(names)
        gone = checkpoints.outdated(complete, Path(folder), best_step)
        half = [p for p in _found(names) if p not in complete]  # an upload was interrupted
        for old in [*gone, *half]:
            for file in (checkpoints.MANIFEST, checkpoints.ARRAYS):
                self._files.remove(f"{old}/{file}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (UnreachableError, FileNotFoundError) as error:
            raise ValueError(f"{self._argument} ({self._url}) cannot be used: {error}.") from None


@contextmanager
def mirrored(
    directory: str | None, warn: Callable[[str], None], *, is_new: bool,
    argument: str = "run_dir", goes_on: str = "resume",
) -> Iterator[Mirror | None]:
    """Within, a remote directory has a local copy, which is uploaded; None for a local directory.

    Args:
        directory: a path, a URL or None.
        warn: called with one line.
        is_new: whether it must be empty; else what it holds is downloaded.
        argument: what the user calls it.
        goes_on: the argument that goes on with a local directory.

    Raises:
        ValueError: it is not empty, or cannot be reached, or a package is missing.
        LostDirectoryError: not all could be uploaded; the copy stays, and is named.
    """
    if not is_remote(directory):
        yield None
        return
    parent = Path(tempfile.mkdtemp(prefix="towers-"))
    try:
        mirror = Mirror(str(directory), argument, goes_on, parent)
        mirror.check_empty() if is_new else mirror.download()
    except BaseException:
        shutil.rmtree(parent, ignore_errors=True)
        raise
    try:
        yield mirror
    except BaseException as refused:
        _finish(mirror, parent, warn)
        if not mirror.copy.exists() and type(refused) is ValueError:  # it names what has gone
            refused.args = (str(refused).replace(str(mirror.copy), str(directory)),)
        try:
            mirror.check()
        except LostDirectoryError as error:  # the other one says how the run has ended
            warn(str(error))
        raise
    _finish(mirror, parent, warn)
    mirror.check()


def _finish(mirror: Mirror, parent: Path, warn: Callable[[str], None]) -> None:
    """Uploads the rest; removes the copy where it is not needed any more."""
    try:
        mirror.finish()
    except BaseException:  # a signal of somebody who does not wait for the network
        warn(f"not all is uploaded: what is missing is in {mirror.copy}.")
        raise
    mirror.tell(warn)
    if mirror.fault is None or not mirror.copy.exists():
        shutil.rmtree(parent, ignore_errors=True)


def _found(names: list[str]) -> list[Path]:
    """The directories of checkpoints among the names of files, the oldest first."""
    folders = {Path(name).parent for name in names if name.count("/") == 2}
    return checkpoints.ordered(
        [path for path in folders if path.parent.name == run_dir.CHECKPOINTS]
    )


def _complete(names: list[str]) -> list[Path]:
    """Those with a manifest."""
    return [path for path in _found(names) if f"{path}/{checkpoints.MANIFEST}" in names]


def _is_visible(file: str) -> bool:
    """Whether it is no temporary file, or none at all."""
    return bool(file) and not file.startswith(".")


def _version(path: Path) -> tuple[int, int] | None:
    """What changes with a file; None where there is none any more."""
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return None
