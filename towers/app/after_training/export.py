"""Exports a trained model for use without towers: a SavedModel, or a file for another runtime.

    path            written              read by
    NAME.onnx       ONNX                 ONNX Runtime
    NAME.tflite     LiteRT               the LiteRT interpreter
    anything else   a SavedModel         served = tf.saved_model.load(path); served.serve(x)
"""

import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from towers.app.diagnosis.verify import in_float32
from towers.app.named import one_line
from towers.app.models import load_file
from towers.app.reporting.report import labelled
from towers.machine.keras_internals import all_layers
from towers.resume.run_dir import CLASSES

# Finds the operations that a runtime lacks in its error message.
_LACKED = re.compile(r"(?:TF Select|Custom) ops: ([\w, ]+)|No Op registered for (\w+)")


def check(path: str | None) -> None:
    """Raises ValueError for an export's path that exists, or whose suffix needs other packages."""
    if path is None:
        return
    for file in (Path(path), _names_file(path)):
        if file.exists():
            raise ValueError(f"export ({file}) exists already; name a new file or directory.")
    runtime, needs = _runtime(path), ""
    if runtime == "ONNX":
        packages = ("tf2onnx", "onnx", "onnxruntime")
        needs = ", ".join(name for name in packages if importlib.util.find_spec(name) is None)
    elif runtime and tuple(map(int, keras.__version__.split(".")[:2])) < (3, 15):
        needs = f"Keras 3.15, not {keras.__version__}"
    if needs:
        raise ValueError(
            f"export ({path}) needs {needs}. Install with: "
            f"pip install 'tf-towers[{str(runtime).lower()}]'"
        )


def export_model(
    model: keras.Model | Path, path: str, class_names: Sequence[str] = (),
    divided: Sequence[bool] = (),
) -> list[str]:
    """Writes a model, or its .keras file, with Keras' `export`; returns lines that describe it.

    The file or directory appears when it is complete. `divided` says for each part of x whether it
    holds images that the model gets divided by 255.

    Raises:
        ValueError: the file cannot be loaded, the runtime cannot take the model, or the path
            cannot be written.
    """
    check(path)
    if isinstance(model, Path):
        model = load_file(model, "export", compile=False)
        shape = (model.get_build_config() or {}).get("input_shape")
        if not getattr(model, "inputs", None) and isinstance(shape, list | tuple):
            # Keras requires a call of a subclass. Custom code may fail: Keras then reports it.
            with suppress(Exception):
                model(keras.Input(batch_shape=tuple(shape)))
    target, runtime = Path(path), _runtime(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as folder:
            # Keras' LiteRT export requires a suffix in lower case.
            written = Path(folder, f"model{target.suffix.lower()}")
            limit = _write(model, written, runtime)
            if class_names:
                names = _names_file(path) if runtime else written / CLASSES
                names.write_text(json.dumps(list(class_names), indent=2) + "\n", encoding="utf-8")
            os.replace(written, target)
    except (OSError, tf.errors.OpError) as error:
        raise ValueError(f"export ({path}) cannot be written: {one_line(error)}.") from error
    except Exception as error:  # a converter's error has no public type
        reason = one_line(error)[:300]
        if lacked := _LACKED.search(str(error)):
            reason = f"not among its operations: {(lacked[1] or lacked[2]).strip()}"
        instead = f" Export a SavedModel, a path without {target.suffix}." if runtime else ""
        raise ValueError(
            f"export ({path}): {runtime or 'Keras'} cannot take this model: {reason}.{instead} "
            "What was trained is as it was."
        ) from error
    lines = [labelled("Export", f"{path} holds the model as {runtime or 'a SavedModel'}{limit}")]
    if any(divided):
        lines.append(labelled("", "it takes images divided by 255"))
    return lines


def _runtime(path: str) -> str | None:
    """Returns the runtime that a path's suffix names; None for a SavedModel."""
    return {".onnx": "ONNX", ".tflite": "LiteRT"}.get(Path(path).suffix.lower())


def _names_file(path: str) -> Path:
    """Returns the path of an export's file of class names."""
    return Path(path).with_suffix(f".{CLASSES}") if _runtime(path) else Path(path) / CLASSES


def _write(model: keras.Model, path: Path, runtime: str | None) -> str:
    """Writes the model; returns a text on a batch size that had to be fixed, or ""."""
    if runtime is None:
        model.export(path, format="tf_saved_model", verbose=False)
        return ""
    # Both runtimes lack bfloat16 and cuDNN operations, and LiteRT also lacks float16 operations.
    with in_float32(model), ExitStack() as stack:
        for layer in all_layers(model):
            if hasattr(layer, "use_cudnn"):
                stack.callback(setattr, layer, "use_cudnn", layer.use_cudnn)
                layer.use_cudnn = False
        if runtime == "ONNX":
            import onnxruntime

            # Without a signature, Keras rejects a model that comes from a file.
            signature = _signature(model)
            model.export(str(path), format="onnx", verbose=False, input_signature=signature)
            # tf2onnx also writes operations that ONNX lacks: loading the file finds them.
            onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            return ""
        # Only LiteRT's own operations, because Python's interpreters run no others.
        spec = {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]}
        export = partial(model.export, str(path), format="litert", verbose=False, target_spec=spec)
        try:
            export(input_signature=_signature(model))
            return ""
        except Exception:  # the loop of an RNN needs a fixed number of examples
            export(input_signature=_signature(model, num_examples=1))
            return ", for one example at a time"


def _signature(model: keras.Model, num_examples: int | None = None) -> list[Any] | None:
    """Returns Keras' specification of the model's inputs, [n, ...] each; None for a subclass."""
    if not getattr(model, "inputs", None):
        return None

    def spec(given: Any) -> keras.InputSpec:
        return keras.InputSpec(given.dtype, (num_examples, *given.shape[1:]), name=given.name)

    inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return [keras.tree.map_structure(spec, inputs)]  # in the structure that the model's call takes
