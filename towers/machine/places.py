"""Makes the user's paths absolute, and shows them in messages as the user gave them."""

import os
import re
from pathlib import Path
from typing import TypeAlias

PathLike: TypeAlias = str | os.PathLike[str]
LOST_DIRECTORY = 5  # the exit code of a run that can no longer write to its directory


class LostDirectoryError(Exception):
    """A run cannot write to its directory; the message says why and where the rest is."""


def as_path(text: str) -> str:
    """Returns the system's form of a path: "~" becomes the home, "file:///runs/1" "/runs/1"."""
    return os.path.expanduser(text.removeprefix("file://"))


def absolute(path: PathLike) -> Path:
    """Returns the absolute path, which does not change if the process changes its directory."""
    return here() / as_path(os.fspath(path))


def here() -> Path:
    """Returns the working directory, or a relative path to it if it has been removed."""
    try:
        return Path.cwd()
    except OSError:
        return Path()


def prefix(directory: Path) -> re.Pattern[str]:
    """Returns a pattern for the part that paths in messages leave out: "/home/me/x" -> "x"."""
    if directory in (Path(), Path("/")):
        return re.compile(r"(?!)")
    return re.compile(rf"(?<![\w./-]){re.escape(str(directory))}/(?=[^\s/])")
