"""Paths that stay what they were when a user gave them, and are shown as the user gave them."""

import os
import re
from pathlib import Path
from typing import Any


LOST_DIRECTORY = 5  # the exit code of a run whose directory takes no more


class LostDirectoryError(Exception):
    """A run's directory takes no more; the message says why, and where to find what it lacks."""


def as_path(text: str) -> str:
    """A path as the system takes it: "~" is the user's home, "file:///runs/1" is "/runs/1"."""
    return os.path.expanduser(text.removeprefix("file://"))


def absolute(path: Any) -> Path:
    """The path as it is now, wherever the process moves; see `as_path`."""
    return here() / as_path(os.fspath(path))


def here() -> Path:
    """The working directory; a relative path to it where it has been removed."""
    try:
        return Path.cwd()
    except OSError:
        return Path()


def prefix(directory: Path) -> re.Pattern[str]:
    """The part that a text may leave out of paths below a directory: "/home/me/x" -> "x".

    Args:
        directory: that a process began in; in the root, nothing can be left out.
    """
    if directory in (Path(), Path("/")):
        return re.compile(r"(?!)")
    return re.compile(rf"(?<![\w./-]){re.escape(str(directory))}/(?=[^\s/])")
