"""Whether this Python can run towers at all: TensorFlow is there, and Keras computes with it."""

import importlib
import json
import os
import sys
from pathlib import Path

OLDEST_TENSORFLOW = (2, 20)


def check() -> None:
    """Imports TensorFlow, after looking at what would make the import useless.

    Raises:
        ValueError: Keras is set to another backend; TensorFlow is missing or too old.
    """
    check_backend()
    check_tensorflow()


def check_backend() -> None:
    """Raises ValueError when Keras computes, or would compute, with another backend."""
    backend, where = _keras_backend()
    if backend != "tensorflow":
        raise ValueError(
            f"Keras' backend is {backend!r} ({where}); towers needs 'tensorflow'. "
            "Set it with: export KERAS_BACKEND=tensorflow"
        )


def check_tensorflow() -> None:
    """Raises ValueError when TensorFlow cannot be imported or is too old."""
    oldest = ".".join(map(str, OLDEST_TENSORFLOW))
    try:
        version = str(importlib.import_module("tensorflow").__version__)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"TensorFlow cannot be imported ({error}). Install it with: "
            f"pip install 'tensorflow>={oldest}'"
        ) from error
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TENSORFLOW:
        raise ValueError(
            f"TensorFlow {version} is too old; towers needs {oldest} or newer. "
            f"Install it with: pip install 'tensorflow>={oldest}'"
        )


def _keras_backend() -> tuple[str, str]:
    """(backend, who says so), as Keras itself finds it; without importing Keras."""
    if "keras" in sys.modules:
        return sys.modules["keras"].config.backend(), "Keras is already imported"
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"], "KERAS_BACKEND"
    path = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "keras.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "tensorflow", "Keras' default"
    return settings.get("backend", "tensorflow"), str(path)
