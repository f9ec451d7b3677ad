"""Checks that this Python can run towers: TensorFlow is installed, and is Keras' backend."""

import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

_OLDEST = (2, 20)


def check() -> None:
    """Imports TensorFlow; raises ValueError if it is missing, too old or not Keras' backend."""
    # The backend is found by Keras' rules, but without importing Keras.
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
    oldest = ".".join(map(str, _OLDEST))
    install = f"Install it with: pip install 'tensorflow>={oldest}'"
    try:
        version = str(importlib.import_module("tensorflow").__version__)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"TensorFlow cannot be imported ({error}). {install}") from error
    if tuple(map(int, version.split(".")[:2])) < _OLDEST:
        raise ValueError(f"TensorFlow {version} is too old; towers needs {oldest}. {install}")
