"""Which line of the user's code is at work, for messages: "gan.py:31"."""

import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import keras
import tensorflow as tf

_LIBRARIES = tuple(
    str(path)
    for path in (
        Path(tf.__file__).parent, Path(keras.__file__).parent, Path(__file__).parents[1],
    )
)
_KERAS = Path(keras.__file__).parent / "src"
_CALLERS = ("/layer.py", "/lambda_layer.py", "/metric.py")  # of what the user wrote, too
_STANDARD = sysconfig.get_paths()["stdlib"]


def current_line() -> str:
    """The innermost line of the user's that is being run."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    return _first_of_the_users(frames)


def line_of(operation: tf.Operation) -> str:
    """The innermost line of the user's that made an operation of a graph."""
    frames = [(frame.filename, frame.lineno) for frame in operation.traceback]
    return _first_of_the_users(reversed(frames))


def is_of_keras(operation: tf.Operation, folder: str) -> bool:
    """Whether Keras' own "layers" or "metrics" made an operation, with no user's line further in.
    """
    for frame in reversed(operation.traceback):
        name = frame.filename
        if not _is_a_librarys(name):
            return False
        if name.startswith(str(_KERAS / folder)) and not name.endswith(_CALLERS):
            return True
    return False


def _first_of_the_users(frames: Iterable[tuple[str, int]]) -> str:
    for name, line in frames:
        if not _is_a_librarys(name):
            return f"{Path(name).name}:{line}"
    return "a line that is not known"


def _is_a_librarys(name: str) -> bool:
    standard = name.startswith(_STANDARD) and "site-packages" not in name
    converted = Path(name).name.startswith("__autograph_generated_file")
    return converted or standard or name.startswith(("<frozen", *_LIBRARIES))
