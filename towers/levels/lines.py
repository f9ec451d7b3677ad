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
_LAYERS = str(Path(keras.__file__).parent / "src" / "layers")
_CALLERS = ("/layer.py", "/lambda_layer.py")  # of what the user wrote, too
_STANDARD = sysconfig.get_paths()["stdlib"]


def current_line() -> str:
    """The innermost line of the user's that is being run."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    return _first_of_the_users(frames)


def line_of(operation: tf.Operation) -> str:
    """The innermost line of the user's that made an operation of a graph."""
    frames = [(frame.filename, frame.lineno) for frame in operation.traceback]
    return _first_of_the_users(reversed(frames))


def is_of_keras_layers(operation: tf.Operation) -> bool:
    """Whether a layer of Keras' own made an operation, with no line of the user's further in."""
    for frame in reversed(operation.traceback):
        if not _is_a_librarys(frame.filename):
            return False
        if frame.filename.startswith(_LAYERS) and not frame.filename.endswith(_CALLERS):
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
