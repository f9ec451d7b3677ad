"""Models by name: the built-in ones, one file each, `package.module:function`, and FILE.keras."""

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import keras

from towers.app import named

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
RECURRENT = ("gru", "lstm")  # whose towers get the threads on a CPU that XLA needs


class ModelSource(NamedTuple):
    """The origin of a model.

    Attributes:
        name: a built-in name, "package.module:function", or FILE.keras.
        build: (input_shape, num_classes) -> a model; one that is not compiled is built, with
            softmax output.
        input_shape: the shape of one example in the model's original task; what the synthetic data
            set takes its shape from.
        num_classes: the number of classes in that task.
        optimizer: the Keras name of the optimizer that the model's source uses.
        knows_shapes: the model is made without a look at the data: `build` passes over its
            arguments.
    """

    name: str
    build: Callable[[Any, Any], keras.Model]
    input_shape: tuple[int, ...] = (28, 28, 1)
    num_classes: int = 10
    optimizer: str = "adam"
    knows_shapes: bool = False


def load(name: str) -> ModelSource:
    """The model of that name; builds nothing yet.

    Args:
        name: one of `NAMES`; or "package.module:function" for a function
            `build(input_shape, num_classes)`, or `build()`, of one's own. Its module may hold the
            constants INPUT_SHAPE (default (28, 28, 1)), NUM_CLASSES (10) and OPTIMIZER ("adam").
            Or FILE.keras, a model that Keras has saved.

    Raises:
        ValueError: the name is unknown, the module cannot be imported, the function is missing,
            or a constant is of another kind.
    """
    if name in _BUILDERS:
        module_name, _, function_name = _BUILDERS[name].partition(":")
        module = importlib.import_module(f"{__name__}.{module_name}")
        return _source(name, _channels_last(getattr(module, function_name)), module)
    if ":" in name:
        function = named.import_function(name, "model")
        return _source(name, function, named.import_module(name, "model"))
    if name.endswith(".keras"):
        return ModelSource(name, lambda *_: load_file(name), knows_shapes=True)
    raise named.unknown_name(name, "model", NAMES)


def load_file(path: str) -> keras.Model:
    """The model in a file that Keras has saved, compiled as it was.

    Raises:
        ValueError: there is no such file, or Keras cannot read it.
    """
    if not os.path.isfile(path):
        raise ValueError(f"model ({path}) does not exist; name a file that model.save has written.")
    try:
        return keras.saving.load_model(path)
    except Exception as error:  # Keras raises many kinds, for layers of one's own, too
        raise ValueError(
            f"model ({path}) cannot be loaded: {named.loading_failed(error)}. Layers of one's own "
            "must be registered: load it in a function of yours, and name that: "
            "model=package.module:function."
        ) from error


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
    knows_shapes = not _takes_arguments(build)
    make = (lambda *_: build()) if knows_shapes else build
    return ModelSource(name, make, tuple(input_shape), num_classes, optimizer, knows_shapes)


def _takes_arguments(function: Callable[..., Any]) -> bool:
    try:
        return bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a function that is not Python's
        return True


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _bad_constant(name: str, constant: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"model ({name!r}): {constant} ({value!r}) in its module must be {wanted}.")


def _channels_last(build: Callable) -> Callable:
    """A builder of models of [n, height, width, channels], whatever keras.json asks for."""

    @functools.wraps(build)
    def built(*arguments: Any) -> keras.Model:
        before = keras.config.image_data_format()
        keras.config.set_image_data_format("channels_last")
        try:
            return build(*arguments)
        finally:
            keras.config.set_image_data_format(before)

    return built
