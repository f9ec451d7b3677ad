"""A trained model as a SavedModel: TensorFlow Serving, and tf.saved_model.load, need no towers."""

import os
import shutil
from pathlib import Path

import keras
import tensorflow as tf
from rich.text import Text

from towers.named import one_line
from towers.recipe.starting_values import load
from towers.reporting.report import labelled


def check(path: str | None) -> None:
    """Raises ValueError where the directory is not a new one, before any time is spent."""
    if path is not None and Path(path).exists():
        raise ValueError(f"export ({path}) exists already; name a new directory.")


def export_model(model: keras.Model | Path, path: str) -> Text:
    """Writes a SavedModel with Keras' `serve`, for any number of examples at once.

    The directory is there when it is complete.

    Args:
        model: a model, or its .keras file.
        path: the new directory.

    Returns:
        A line that says so.

    Raises:
        ValueError: the file cannot be loaded, or the directory cannot be written.
    """
    check(path)
    if isinstance(model, Path):
        model = load(model, "export")
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        model.export(temporary, format="tf_saved_model", verbose=False)
        os.replace(temporary, target)
    except (OSError, tf.errors.OpError) as error:
        raise ValueError(f"export ({path}) cannot be written: {one_line(error)}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return labelled("Export", f"{path} holds the model as a SavedModel")
