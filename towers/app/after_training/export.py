"""Exports a trained model as a SavedModel, which works without towers and without its classes.

served = tf.saved_model.load(path); served.serve(x)
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import keras
import tensorflow as tf

from towers.app.named import one_line
from towers.app.models import load_file
from towers.app.reporting.report import labelled
from towers.app import run_dir
from towers.resume import directories


def check(path: str | None) -> None:
    """Raises ValueError for an export's path that exists, or that names another format."""
    if path is None:
        return
    if Path(path).exists():
        raise ValueError(f"export ({path}) exists already; name a new directory.")
    if Path(path).suffix.lower() in (".onnx", ".tflite", ".keras", ".h5"):
        raise ValueError(
            f"export ({path}) is the directory of a SavedModel. For other formats, use Keras' "
            "`export` or `save` of the model in final.keras."
        )


def export_model(
    model: keras.Model | Path,
    path: str,
    class_names: Sequence[str] = (),
    divided: Sequence[bool] = (),
) -> list[str]:
    """Writes a model, or its .keras file, with Keras' `export`; returns lines that describe it.

    The directory appears when it is complete. `divided` says for each part of x whether it holds
    images that the model gets divided by 255.

    Raises ValueError if the file cannot be loaded or exported, or the path cannot be written.
    """
    check(path)
    if isinstance(model, Path):
        model = load_file(model, "export", compile=False)
        shape = (model.get_build_config() or {}).get("input_shape")
        if not getattr(model, "inputs", None) and isinstance(shape, list | tuple):
            # Keras requires a call of a subclass. Custom code may fail: Keras then reports it.
            with suppress(Exception):
                model(keras.Input(batch_shape=tuple(shape)))

    def write(folder: Path) -> None:
        model.export(folder, format="tf_saved_model", verbose=False)
        run_dir.write_class_names(folder, class_names)

    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        directories.write_atomically(Path(path), write)
    except (OSError, tf.errors.OpError) as error:
        raise ValueError(f"export ({path}) cannot be written: {one_line(error)}.") from error
    except Exception as error:  # Keras raises any type of error
        raise ValueError(
            f"export ({path}): Keras cannot take this model: {one_line(error)[:300]}. The "
            "trained model has not changed."
        ) from error
    lines = [labelled("Export", f"{path} holds the model as a SavedModel")]
    if any(divided):
        lines.append(labelled("", "it takes images divided by 255"))
    return lines
