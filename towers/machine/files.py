"""Opens files that a stranger may have made: regular files only, and no more bytes than expected.

A copied run directory may hold a symbolic link to a file elsewhere, a named pipe to which nobody
writes, or a link to an endless device. Data may hold these, too, or expand to a thousand times
their size. Data may be links to files: data sets are often made of links.
"""

import errno
import gzip
import os
import stat
from pathlib import Path
from typing import BinaryIO

SMALL = 2**20  # bytes; the limit for a text of a few lines
EXPANDED, _EXPANSION = 2**26, 100  # bytes that any archive may hold; and times its own size


class RefusedError(OSError):
    """A file that is not opened because of its kind or size; `strerror` says why."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EINVAL, why, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_to_read(path: str | os.PathLike[str], *, follow: bool = False) -> BinaryIO:
    """Opens a regular file. Without `follow`, a symbolic link raises RefusedError."""
    return os.fdopen(_descriptor(path, os.O_RDONLY, follow), "rb")


def open_to_append(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file at its end, and makes it if there is none. It follows no link."""
    return os.fdopen(_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, False), "ab")


def open_to_lock(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file to read and write, makes it if there is none, and follows no link."""
    return os.fdopen(_descriptor(path, os.O_RDWR | os.O_CREAT, False), "r+b")


def read(path: str | os.PathLike[str], most: int, *, follow: bool = False) -> bytes:
    """Returns the content of a regular file; raises RefusedError if it has more than `most`."""
    with open_to_read(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise RefusedError(path, f"it is larger than {most:,} bytes")
        return file.read(size)


def read_text(path: str | os.PathLike[str], most: int = SMALL) -> str:
    """Returns the UTF-8 text of a regular file that is no link; raises as `read` does."""
    return read(path, most).decode()


def read_gzip(path: str | os.PathLike[str]) -> bytes:
    """Returns the content of a gzipped file of data, at most `most_expanded` bytes of it."""
    with open_to_read(path, follow=True) as file:
        most = most_expanded(os.fstat(file.fileno()).st_size)
        content = gzip.GzipFile(fileobj=file).read(most + 1)
    if len(content) > most:
        raise RefusedError(path, f"it expands to more than {most:,} bytes")
    return content


def read_end(path: str | os.PathLike[str], most: int) -> str:
    """Returns the last `most` bytes of a text file that is no link, such as a log."""
    with open_to_read(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most).decode(errors="replace")


def check_link(path: str | os.PathLike[str]) -> None:
    """Raises RefusedError if the path is a symbolic link. Call it before a library opens it."""
    if os.path.islink(path):
        raise RefusedError(path, "it is a symbolic link, which towers does not follow")


def check_tree(folder: Path) -> None:
    """Raises RefusedError if a folder, or anything below it, is a symbolic link."""
    check_link(folder)
    for root, folders, names in os.walk(folder):
        for name in (*folders, *names):
            check_link(os.path.join(root, name))


def most_expanded(size: int) -> int:
    """Returns the number of bytes that a compressed file of this size may hold.

    Deflate packs up to 1032:1 and bzip2 a million to one, so that a small file could fill all
    memory. Images and texts stay below 100:1.
    """
    return max(EXPANDED, _EXPANSION * size)


def _descriptor(path: str | os.PathLike[str], flags: int, follow: bool) -> int:
    try:  # looked at before it is opened, because opening some devices acts on them
        _check_kind(path, os.stat(path, follow_symlinks=follow))
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    # A pipe that has taken the file's place would block without O_NONBLOCK.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, 0o666)
    try:
        _check_kind(path, os.fstat(descriptor))
    except RefusedError:
        os.close(descriptor)
        raise
    return descriptor


def _check_kind(path: str | os.PathLike[str], found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise RefusedError(path, "it is a symbolic link, which towers does not follow")
    if not stat.S_ISREG(found.st_mode):
        raise RefusedError(path, "it is no regular file")
