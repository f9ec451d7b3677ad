"""A model as one file of another runtime: .onnx for ONNX Runtime, .tflite for LiteRT."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine.keras_internals import all_layers
from towers.app.named import one_line

_LITERT_NEEDS_KERAS = (3, 15)
_LONGEST_REASON = 300  # characters
# How the runtimes name the operations that they lack.
_LACKED = re.compile(r"(?:TF Select|Custom) ops: ([\w, ]+)|No Op registered for (\w+)")


class Runtime(NamedTuple):
    """A runtime that reads one file.

    name: what it is called.
    check: raises ValueError where `write` to a path needs a package that is missing.
    write: (model, new file of the runtime's suffix) -> what of the model's batch is fixed, in
        words, or "". It raises any Exception where the runtime cannot take the model.
    """

    name: str
    check: Callable[[str], None]
    write: Callable[[keras.Model, Path], str]


def runtime_of(path: str | Path) -> Runtime | None:
    """The runtime that a path's suffix names; None for a directory's path."""
    return _RUNTIMES.get(Path(path).suffix.lower())


def refused(runtime: Runtime, path: str, error: Exception) -> ValueError:
    """The error for a model that a runtime cannot take: which operations it lacks, or the cause."""
    lacked = _LACKED.search(str(error))
    reason = (
        f"not among its operations: {(lacked[1] or lacked[2]).strip()}" if lacked
        else one_line(error)[:_LONGEST_REASON]
    )
    return ValueError(
        f"export ({path}): {runtime.name} cannot take this model: {reason}. Export a SavedModel, "
        f"a path without {Path(path).suffix}; what was trained is as it was."
    )


def _check_onnx(path: str) -> None:
    needed = ("tf2onnx", "onnx", "onnxruntime")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"export ({path}) needs {', '.join(missing)}. Install with: "
            "pip install 'tf-towers[onnx]'"
        )


def _check_litert(path: str) -> None:
    oldest = ".".join(map(str, _LITERT_NEEDS_KERAS))
    if tuple(int(part) for part in keras.__version__.split(".")[:2]) < _LITERT_NEEDS_KERAS:
        raise ValueError(
            f"export ({path}) needs Keras {oldest} or newer; this is {keras.__version__}. "
            "Install it with: pip install 'tf-towers[litert]'"
        )


def _write_onnx(model: keras.Model, path: Path) -> str:
    """tf2onnx writes operations that ONNX lacks as well, so the runtime has to load the file."""
    import onnxruntime

    with _convertible(model):
        # Without a signature, Keras refuses a model that comes from a file.
        signature = _signature(model, None)
        model.export(str(path), format="onnx", verbose=False, input_signature=signature)
    onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return ""


def _write_litert(model: keras.Model, path: Path) -> str:
    """With LiteRT's own operations alone: the interpreters of Python run no others.

    A loop of an RNN is one of them where the number of examples is fixed.
    """
    options: dict[str, Any] = {
        "format": "litert", "verbose": False,
        "target_spec": {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]},
    }
    with _convertible(model):
        try:
            model.export(str(path), **options)
            return ""
        except Exception:  # the converter's error has no public type
            one_example = _signature(model, 1)
            if one_example is None:
                raise
        model.export(str(path), input_signature=one_example, **options)
        return ", for one example at a time"


def _signature(model: keras.Model, num_examples: int | None) -> list[Any] | None:
    """Keras' specification of the model's inputs, [n, ...] each; None of a subclass' model."""
    if isinstance(model, keras.Sequential):
        inputs = model.inputs[0]
    elif getattr(model, "inputs", None):
        inputs = model.input
    else:
        return None
    return [keras.tree.map_structure(
        lambda given: keras.InputSpec(given.dtype, (num_examples, *given.shape[1:]),
                                      name=given.name),
        inputs,
    )]


@contextmanager
def _convertible(model: keras.Model) -> Iterator[None]:
    """Within, layers compute in their variables' dtype, and RNNs by themselves, not by cuDNN.

    Both runtimes lack bfloat16's and cuDNN's operations, and LiteRT those of float16.
    """
    before = []
    for layer in all_layers(model):
        policy = layer.dtype_policy
        if policy.name.startswith("mixed_"):
            before.append((layer, "dtype_policy", policy))
            layer.dtype_policy = keras.DTypePolicy(policy.variable_dtype)
        if hasattr(layer, "use_cudnn"):
            before.append((layer, "use_cudnn", layer.use_cudnn))
            layer.use_cudnn = False
    try:
        yield
    finally:
        for layer, name, value in before:
            setattr(layer, name, value)


_RUNTIMES = {
    ".onnx": Runtime("ONNX", _check_onnx, _write_onnx),
    ".tflite": Runtime("LiteRT", _check_litert, _write_litert),
}
