"""A trained model for those that have no towers: a SavedModel, or one file of another runtime."""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import keras
import tensorflow as tf
from rich.text import Text

from towers.app.after_training import runtimes
from towers.app.named import one_line
from towers.app.models import load_file
from towers.app.reporting.report import labelled

_CLASSES = "classes.json"


def check(path: str | None, takes_pixels: bool = False) -> None:
    """Before any time is spent.

    Raises:
        ValueError: the path is not a new one, or a package is missing that its suffix needs; or
            there is no path, and so no model that could take pixels.
    """
    if path is None:
        if takes_pixels:
            raise ValueError("export_pixels=True needs `export`, what is to take pixels.")
        return
    runtime = runtimes.runtime_of(path)
    for found in (Path(path), _names_file(path)):
        if found.exists():
            kind = "directory" if runtime is None else "file"
            raise ValueError(f"export ({found}) exists already; name a new {kind}.")
    if runtime is not None:
        runtime.check(path)


def check_pixels(model: keras.Model, divided: Sequence[bool]) -> None:
    """Raises ValueError where an exported model cannot divide pixels itself, see `export_model`."""
    if not any(divided):
        raise ValueError(
            "export_pixels=True: towers divided no images by 255 for this model. Leave it out; the "
            "exported model takes what the trained model takes."
        )
    if not getattr(model, "inputs", None):
        raise ValueError(
            "export_pixels=True needs a Sequential or functional model, whose inputs are known. "
            "Leave it out, and divide the pixels by 255 before the exported model."
        )


def export_model(
    model: keras.Model | Path,
    path: str,
    class_names: Sequence[str] = (),
    divided: Sequence[bool] = (),
    takes_pixels: bool = False,
) -> list[Text]:
    """Writes a model with Keras' `export`, for any number of examples at once where that can be.

    The suffix decides: .onnx is ONNX, .tflite is LiteRT, and all else the directory of a
    SavedModel, whose endpoint is `serve`. What is written is there when it is complete.

    Args:
        model: a model, or its .keras file.
        path: the new file or directory.
        class_names: by label; they are written into the directory as classes.json, or beside the
            file NAME.onnx as NAME.classes.json.
        divided: which parts of x are images that the model gets divided by 255.
        takes_pixels: the exported model takes uint8 images and divides them by 255 itself.

    Returns:
        Lines that say so.

    Raises:
        ValueError: the file cannot be loaded, the runtime cannot take the model, or the path
            cannot be written.
    """
    check(path)
    if isinstance(model, Path):
        model = _called(load_file(model, "export", compile=False))
    if takes_pixels:
        check_pixels(model, divided)
        model = _of_pixels(model, divided)
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
        if class_names:
            names = temporary / _CLASSES if runtime is None else _names_file(path)
            names.write_text(json.dumps(list(class_names), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, target)
    except (OSError, tf.errors.OpError) as error:
        raise ValueError(f"export ({path}) cannot be written: {one_line(error)}.") from error
    except Exception as error:
        if runtime is not None:
            raise runtimes.refused(runtime, path, error) from error
        raise ValueError(f"export ({path}): Keras cannot export it: {one_line(error)}.") from error
    finally:
        _remove(temporary)
    lines = [labelled("Export", f"{path} holds the model as {kind}{limit}")]
    if takes_pixels:
        lines.append(labelled("", "it takes uint8 images, 0 to 255, and divides them by 255"))
    elif any(divided):
        lines.append(labelled("", "it takes images divided by 255; with export_pixels, 0 to 255"))
    if class_names:
        lines.append(labelled("", f"class names: {_names_file(path)}"))
    return lines


def _names_file(path: str) -> Path:
    """The file of an export's class names."""
    is_directory = runtimes.runtime_of(path) is None
    return Path(path) / _CLASSES if is_directory else Path(path).with_suffix(f".{_CLASSES}")


def _of_pixels(model: keras.Model, divided: Sequence[bool]) -> keras.Model:
    """The model behind a division by 255 of those parts of its input that are images."""
    given = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    parts = list(zip(keras.tree.flatten(given), divided, strict=True))
    inputs = [
        keras.Input(batch_shape=part.shape, dtype="uint8" if is_image else part.dtype,
                    name=part.name)
        for part, is_image in parts
    ]
    x = [
        keras.ops.cast(part, "float32") / 255 if is_image else part
        for part, (_, is_image) in zip(inputs, parts, strict=True)
    ]
    outputs = model(keras.tree.pack_sequence_as(given, x), training=False)
    return keras.Model(keras.tree.pack_sequence_as(given, inputs), outputs, name=model.name)


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
