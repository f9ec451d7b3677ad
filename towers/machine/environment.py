"""Checks that this Python can run towers: TensorFlow is installed, and is Keras' backend."""

import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

OLDEST_TENSORFLOW = (2, 20)


def check() -> None:
    """Imports TensorFlow, after checking for what would make the import useless.

    Raises:
        ValueError: Keras uses another backend, or TensorFlow is missing or too old.
    """
    check_backend()
    check_tensorflow()


def check_backend() -> None:
    """Raises ValueError if Keras computes, or would compute, with another backend.

    The backend is found by Keras' rules, but without importing Keras.
    """
    backend, where = "tensorflow", "Keras' default"
    if "keras" in sys.modules:
        backend, where = sys.modules["keras"].config.backend(), "Keras is already imported"
    elif os.environ.get("KERAS_BACKEND"):
        backend, where = os.environ["KERAS_BACKEND"], "KERAS_BACKEND"
    else:
        path = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "keras.json"
        with suppress(OSError, ValueError):
            settings = json.loads(path.read_text(encoding="utf-8"))
            backend, where = settings.get("backend", backend), str(path)
    if backend != "tensorflow":
        raise ValueError(
            f"Keras' backend is {backend!r} ({where}); towers needs 'tensorflow'. "
            "Set it with: export KERAS_BACKEND=tensorflow"
        )


def check_tensorflow() -> None:
    """Raises ValueError if TensorFlow cannot be imported or is too old."""
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
