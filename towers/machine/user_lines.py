"""Finds the line of the user's code that is running, for warnings and messages ("gan.py:31")."""

import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any


def _folder(library: str) -> str:
    """Returns a library's folder without importing it, because a command may fail before that."""
    spec = find_spec(library)
    if spec and spec.origin:
        return str(Path(spec.origin).parent)
    return f"<no {library}>"


_LIBRARIES = (*map(_folder, ("tensorflow", "keras")), str(Path(__file__).parents[1]))
_STANDARD = sysconfig.get_paths()["stdlib"]
_UNKNOWN = "a line that is not known"


class TowersWarning(UserWarning):
    """Tells the warnings of towers from others: their file is the user's, too."""


def warn_user(message: str) -> None:
    """Warns at the innermost line of the user's code, which may be far from its caller."""
    frames = [
        frame
        for frame, _ in traceback.walk_stack(None)
        if not _is_a_librarys(frame.f_code.co_filename)
    ]
    # A tracker's wrapper of `fit` is not the user's code, unless there is no other.
    own = [frame for frame in frames if "site-packages" not in frame.f_code.co_filename] or frames
    if not own:  # such as in a thread
        warnings.warn(message, TowersWarning, stacklevel=2)
        return
    values = own[0].f_globals
    warnings.warn_explicit(
        message,
        TowersWarning,
        own[0].f_code.co_filename,
        own[0].f_lineno,
        module=values.get("__name__"),
        registry=values.setdefault("__warningregistry__", {}),
    )


def current_line() -> str:
    """Returns the innermost line of the user's code that is running."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    return _first_of_the_users(frames)


def line_of(operation: Any) -> str:
    """Returns the innermost line of the user's code that made a tf.Operation of a graph."""
    frames = [(frame.filename, frame.lineno) for frame in operation.traceback]
    return _first_of_the_users(reversed(frames))


def line_of_error(error: BaseException | None) -> str | None:
    """Returns the innermost line of the user's code that raised an error or its cause, or None."""
    while error is not None:
        walked = list(traceback.walk_tb(error.__traceback__))
        frames = ((_file_of(frame), number) for frame, number in reversed(walked))
        line = _first_of_the_users(each for each in frames if "site-packages" not in each[0])
        if line != _UNKNOWN:
            return line
        error = error.__cause__
    return None


def _file_of(frame: FrameType) -> str:
    """Returns the file of a frame's code; for a method that a dataclass generated, its class'."""
    name = frame.f_code.co_filename
    if name == "<string>":
        return str(frame.f_globals.get("__file__", name))
    return name


def _first_of_the_users(frames: Iterable[tuple[str, int]]) -> str:
    for name, line in frames:
        if not _is_a_librarys(name):
            return f"{Path(name).name}:{line}"
    return _UNKNOWN


def _is_a_librarys(name: str) -> bool:
    standard = name.startswith(_STANDARD) and "site-packages" not in name
    converted = Path(name).name.startswith("__autograph_generated_file")
    return converted or standard or name.startswith(("<frozen", *_LIBRARIES))
