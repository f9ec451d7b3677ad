"""A trained model for those that have no towers: a SavedModel, or one file of another runtime."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import keras
import tensorflow as tf
from rich.text import Text

from towers.after_training import runtimes
from towers.named import one_line
from towers.recipe.starting_values import load
from towers.reporting.report import labelled


def check(path: str | None) -> None:
    """Before any time is spent.

    Raises:
        ValueError: the path is not a new one, or a package is missing that its suffix needs.
    """
    if path is None:
        return
    runtime = runtimes.runtime_of(path)
    if Path(path).exists():
        kind = "directory" if runtime is None else "file"
        raise ValueError(f"export ({path}) exists already; name a new {kind}.")
    if runtime is not None:
        runtime.check(path)


def export_model(model: keras.Model | Path, path: str) -> Text:
    """Writes a model with Keras' `export`, for any number of examples at once where that can be.

    The suffix decides: .onnx is ONNX, .tflite is LiteRT, and all else the directory of a
    SavedModel, whose endpoint is `serve`. What is written is there when it is complete.

    Args:
        model: a model, or its .keras file.
        path: the new file or directory.

    Returns:
        A line that says so.

    Raises:
        ValueError: the file cannot be loaded, the runtime cannot take the model, or the path
            cannot be written.
    """
    check(path)
    if isinstance(model, Path):
        model = _called(load(model, "export"))
    target, runtime = Path(path), runtimes.runtime_of(path)
    # Keras' LiteRT wants the suffix in small letters.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp{target.suffix.lower()}")
    kind, limit = "a SavedModel", ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if runtime is None:
            model.export(temporary, format="tf_saved_model", verbose=False)
        else:
            kind, limit = runtime.name, runtime.write(model, temporary)
        os.replace(temporary, target)
    except (OSError, tf.errors.OpError) as error:
        raise ValueError(f"export ({path}) cannot be written: {one_line(error)}.") from error
    except Exception as error:
        if runtime is not None:
            raise runtimes.refused(runtime, path, error) from error
        raise ValueError(f"export ({path}): Keras cannot export it: {one_line(error)}.") from error
    finally:
        _remove(temporary)
    return labelled("Export", f"{path} holds the model as {kind}{limit}")


def _called(model: keras.Model) -> keras.Model:
    """The model; that of a subclass with one input is called, which Keras' `export` asks for."""
    shape = (model.get_build_config() or {}).get("input_shape")
    if not getattr(model, "inputs", None) and isinstance(shape, list | tuple):
        with suppress(Exception):  # the model's own code; Keras then says that it was not called
            model(keras.Input(batch_shape=tuple(shape)))
    return model


def _remove(path: Path) -> None:
    """Removes what there may be of a file or directory."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
