"""Models by name: the built-in ones, one file each, and the user's `package.module:function`."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import keras

from towers import named

# To add a model: a file in this folder, and a line here: its name, "module:function".
_BUILDERS = {
    "cnn": "cnn:build",
    "notebook_cnn": "notebook_cnn:build",
    "mlp": "mlp:build",
    "gru": "gru:build",
    "lstm": "lstm:build",
    "resnet": "resnet:build",
    "resnet20": "resnet:build_20",
    "resnet56": "resnet:build_56",
    "resnet50": "resnet50:build",
}
NAMES = tuple(_BUILDERS)


class ModelSource(NamedTuple):
    """Where a model comes from.

    name: a built-in name, or "package.module:function".
    build: (input_shape, num_classes) -> a built model, softmax output.
    input_shape: the shape of one example in the model's original task; what the synthetic data
        set takes its shape from.
    num_classes: the number of classes in that task.
    optimizer: the Keras name of the optimizer that the model's source uses.
    """

    name: str
    build: Callable[[tuple[int, ...], int], keras.Model]
    input_shape: tuple[int, ...]
    num_classes: int
    optimizer: str


def load(name: str) -> ModelSource:
    """The model of that name; builds nothing yet.

    Args:
        name: one of `NAMES`, or "package.module:function" for a function
            `build(input_shape, num_classes)` of one's own. Its module may hold the constants
            INPUT_SHAPE (default (28, 28, 1)), NUM_CLASSES (10) and OPTIMIZER ("adam").

    Raises:
        ValueError: the name is unknown, the module cannot be imported, the function is missing,
            or a constant is of another kind.
    """
    if name in _BUILDERS:
        module_name, _, function_name = _BUILDERS[name].partition(":")
        module = importlib.import_module(f"{__name__}.{module_name}")
        return _source(name, getattr(module, function_name), module)
    if ":" in name:
        function = named.import_function(name, "model")
        return _source(name, function, named.import_module(name, "model"))
    raise named.unknown_name(name, "model", NAMES)


def _source(name: str, build: Callable[..., keras.Model], module: ModuleType) -> ModelSource:
    input_shape = getattr(module, "INPUT_SHAPE", (28, 28, 1))
    num_classes = getattr(module, "NUM_CLASSES", 10)
    optimizer = getattr(module, "OPTIMIZER", "adam")
    if not isinstance(input_shape, list | tuple) or not all(map(_is_count, input_shape)):
        raise _bad_constant(name, "INPUT_SHAPE", input_shape, "a tuple such as (28, 28, 1)")
    if not _is_count(num_classes):
        raise _bad_constant(name, "NUM_CLASSES", num_classes, "a whole number, at least 1")
    if not isinstance(optimizer, str):
        raise _bad_constant(name, "OPTIMIZER", optimizer, "a Keras name such as 'adam'")
    return ModelSource(name, build, tuple(input_shape), num_classes, optimizer)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _bad_constant(name: str, constant: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"model ({name!r}): {constant} ({value!r}) in its module must be {wanted}.")
