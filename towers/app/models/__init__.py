"""Finds models by name: built-in models, `package.module:function`, and FILE.keras."""

import inspect
import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import keras

from towers.app import named
from towers.app.models import builtin


class ModelSource(NamedTuple):
    """Holds the function that makes a model, and the sizes of the task it was designed for.

    Synthetic data use these sizes. A model that is not compiled has softmax output.
    """

    name: str
    build: Callable[[Any, Any], keras.Model]  # (input_shape, num_classes) -> a model
    input_shape: tuple[int, ...] = (28, 28, 1)  # of one example
    num_classes: int = 10
    optimizer: str = "adam"  # the Keras name of the default optimizer
    knows_shapes: bool = False  # whether `build` ignores its arguments


def _recurrent(
    name: str, layer: type[keras.layers.Layer], num_layers: int, units: int
) -> ModelSource:
    build = partial(builtin.rnn, name, layer, num_layers=num_layers, units=units)
    return ModelSource(name, build, (49, 128), 128)  # the sizes of the melodies, one-hot


_CIFAR = (32, 32, 3)
# To add a model, write a function (input_shape, num_classes) in this folder and a line here.
_BUILT_IN = {
    source.name: source
    for source in (
        ModelSource("cnn", builtin.cnn),
        ModelSource("notebook_cnn", builtin.notebook_cnn, optimizer="rmsprop"),
        ModelSource("mlp", builtin.mlp),
        _recurrent("gru", keras.layers.GRU, 2, 256),
        _recurrent("gru_large", keras.layers.GRU, 4, 1024),
        _recurrent("lstm", keras.layers.LSTM, 2, 256),
        _recurrent("lstm_large", keras.layers.LSTM, 4, 1024),
        ModelSource("resnet", builtin.resnet, _CIFAR),
        ModelSource("resnet20", builtin.resnet20, _CIFAR),
        ModelSource("resnet56", partial(builtin.build_small, "resnet56", num_blocks=9), _CIFAR),
        ModelSource("resnet50", builtin.resnet50, (224, 224, 3), 1000),
    )
}
NAMES = tuple(_BUILT_IN)


def load(name: str) -> ModelSource:
    """Returns the source of the model with this name; builds nothing yet.

    name: one of `NAMES`; or FILE.keras, a model that Keras has saved; or "package.module:function"
        for a custom function `build(input_shape, num_classes)` or `build()`. Its module may hold
        the constants INPUT_SHAPE (default (28, 28, 1)), NUM_CLASSES (10) and OPTIMIZER ("adam").

    Raises ValueError if the name is unknown, the module cannot be imported, the function is
    missing, or a constant has the wrong type.
    """
    known = _BUILT_IN.get(name)
    if known is not None:
        return known._replace(build=partial(_channels_last, known.build))
    if ":" in name:
        return _custom(name)
    if name.endswith(".keras"):
        return ModelSource(name, lambda *_: load_file(name), knows_shapes=True)
    raise named.unknown_name(name, "model", NAMES)


def load_file(path: str | Path, argument: str = "model", *, compile: bool = True) -> keras.Model:
    """Loads a model from a file that Keras has saved. `argument` begins the ValueError."""
    if not Path(path).is_file():
        raise ValueError(f"{argument} ({path}) does not exist; name a file of model.save.")
    try:
        return keras.saving.load_model(path, compile=compile)
    except Exception as error:  # zip files, JSON, HDF5 and layers raise different types
        # Keras' message repeats the model's configuration at each level of nesting.
        reason = named.one_line(error)[:300]
        if unknown := re.search(r"Could not locate (class|function) '[^']*'", str(error)):
            reason = unknown[0]
        if Path(path).suffix == ".keras" and not zipfile.is_zipfile(path):  # Keras: "not found"
            reason = "it is damaged, or not from model.save"
        raise ValueError(
            f"{argument} ({path}) cannot be loaded by Keras: {reason}. Custom layers need "
            "keras.saving.register_keras_serializable, in the module that `model` names: "
            "model=package.module:function."
        ) from error


def _custom(name: str) -> ModelSource:
    build, module = named.import_function(name, "model"), named.import_module(name, "model")
    shape = getattr(module, "INPUT_SHAPE", (28, 28, 1))
    num_classes = getattr(module, "NUM_CLASSES", 10)
    optimizer = getattr(module, "OPTIMIZER", "adam")
    is_right = isinstance(shape, list | tuple) and isinstance(optimizer, str)
    if not is_right or not all(type(n) is int and n > 0 for n in (num_classes, *shape)):
        raise ValueError(
            f"model ({name!r}): its module must hold INPUT_SHAPE ({shape!r}) such as (28, 28, 1), "
            f"NUM_CLASSES ({num_classes!r}) such as 10, OPTIMIZER ({optimizer!r}) such as 'adam'."
        )
    source = ModelSource(name, build, tuple(shape), num_classes, optimizer)
    if inspect.signature(build).parameters:
        return source
    return source._replace(build=lambda *_: build(), knows_shapes=True)


def _channels_last(build: Callable[[Any, Any], keras.Model], *arguments: Any) -> keras.Model:
    """Builds a model for [n, height, width, channels], even if keras.json says channels_first."""
    before = keras.config.image_data_format()
    keras.config.set_image_data_format("channels_last")
    try:
        return build(*arguments)
    finally:
        keras.config.set_image_data_format(before)
