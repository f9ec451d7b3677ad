"""Makes a run's model and data, in an order that depends on the model.

function of (input_shape, num_classes)    the data, then the model
any other model                           the model, then the data, which have class labels
                                          unless the model is compiled
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.app import datasets, models, named
from towers.app.config import TrainConfig
from towers.app.datasets.dataset import Dataset
from towers.app.datasets.user import from_splits
from towers.app.models import ModelSource
from towers.app.named import one_line
from towers.machine.tensorflow_internals import ends_in_batch

PYTHON = "python"  # stands in config.json for such an object, which no name can restore
_OTHER_TASK = "If the model is no classifier, or has several inputs, compile it with its loss."


class UserObjects(NamedTuple):
    """Holds the objects passed to `towers.train`; None if the configuration names the object."""

    model: keras.Model | None = None
    train: Any = None
    test: Any = None

    def named_in(self, config: TrainConfig) -> TrainConfig:
        """Returns the configuration with "python" in place of the name of each given object.

        An object that has the wrong type, is given twice, or is missing is a ValueError.
        """
        if self.model is not None and not isinstance(self.model, keras.Model):
            raise ValueError(f"model ({self.model!r}) must be a keras.Model.")
        if self.test is not None and self.train is None:
            raise ValueError("`test` needs `train`: give the examples to train on as well.")
        for name in ("data_dir", "image_size"):
            if self.train is not None and (value := getattr(config, name)) is not None:
                raise ValueError(f"{name} ({value}) has no effect beside `train`; leave it out.")
        given = {"model": self.model, "dataset": self.train}
        for name, value in given.items():
            said, default = getattr(config, name), getattr(TrainConfig, name)
            if value is None and said == PYTHON:
                resume = f"towers.TrainConfig(resume={config.resume!r})"
                raise ValueError(
                    f"{name} ({PYTHON}) is an object of the script that began the run, which no "
                    f"name brings back. Call towers.train({resume if config.resume else 'config'}, "
                    "...) there, with the same model, train and test."
                )
            if value is not None and said != PYTHON and (config.resume or said != default):
                raise ValueError(
                    f"{name} ({said}) is the configuration's, and an object is given beside it: "
                    "give only one of them."
                )
        names: Any = {name: PYTHON for name, value in given.items() if value is not None}
        return dataclasses.replace(config, **names)


def is_python(config: TrainConfig) -> bool:
    """Returns whether a run's model or data are Python objects, which no flag can name."""
    return PYTHON in (config.model, config.dataset)


def load_callbacks(
    spec: str | None,
    given: keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | None = (),
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of the function "package.module:function", if any, then those given.

    As for Keras, one callback may stand for a list of one, and None for an empty list.

    Raises ValueError if the function cannot be imported, or a callback is not a Keras callback or
    is a BackupAndRestore, which would replace the run's weights.
    """
    returned = [] if spec is None else named.import_function(spec, "callbacks")()
    of_each = {f"callbacks ({spec!r}) returned": returned, "callbacks hold": given or []}
    found = [(begin, one) for begin, some in of_each.items() for one in keras.tree.flatten(some)]
    for begin, callback in found:
        _check_callback(begin, callback)
    return [callback for _, callback in found]


def _check_callback(begin: str, callback: object) -> None:
    """Raises ValueError unless a run can have a callback; begin: of the message."""
    if not isinstance(callback, keras.callbacks.Callback):
        raise ValueError(
            f"{begin} {callback!r}, which is no keras.callbacks.Callback; give instances of it."
        )
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        raise ValueError(
            f"{begin} a BackupAndRestore, which would replace the weights of a run. The run saves "
            "checkpoints already: leave BackupAndRestore out, and resume the run's directory."
        )


def find_source(config: TrainConfig, objects: UserObjects) -> ModelSource:
    """Returns the source of the model, without building it.

    If `precision` is set for a model whose layers are already made, it raises ValueError.
    """
    if config.precision != "float32" and (
        objects.model is not None or config.model.endswith(".keras")
    ):
        raise ValueError(
            f"precision ({config.precision}) has no effect on model ({config.model}), whose layers "
            "are made: leave it out; they keep their own."
        )
    if objects.model is not None:
        return ModelSource(PYTHON, lambda *_: objects.model, knows_shapes=True)
    return models.load(config.model)


def make_model_and_data(
    config: TrainConfig, source: ModelSource, objects: UserObjects, parameter_device: str
) -> tuple[keras.Model, Dataset]:
    """Makes the model, which may not be built or compiled yet, and its data.

    If one of them cannot be made, or they do not fit each other, it raises ValueError.
    """

    def make(input_shape: Any, num_classes: int | None) -> keras.Model:
        keras.utils.set_random_seed(config.seed)
        with tf.device(parameter_device):
            model = source.build(input_shape, num_classes)
        if not isinstance(model, keras.Model):
            kind = type(model).__name__
            raise ValueError(f"model ({source.name!r}) returned {kind}; it must be a keras.Model.")
        return model

    def load(custom_loss: bool) -> Dataset:
        if objects.train is not None:
            return from_splits(PYTHON, objects.train, objects.test, custom_loss=custom_loss)
        return datasets.load(
            config.dataset,
            config.data_dir,
            input_shape=source.input_shape,
            num_classes=source.num_classes,
            custom_loss=custom_loss,
            image_size=config.image_shape,
        )

    if source.knows_shapes:
        model = make(None, None)
        x, y = (getattr(model, name, None) for name in ("input_shape", "output_shape"))
        if isinstance(x, tuple) and isinstance(y, tuple) and None not in (*x[1:], y[-1]):
            source = source._replace(input_shape=x[1:], num_classes=y[-1])  # for synthetic data
        dataset, problem = (load(True), None) if model.compiled else load_either(load)
        _check_unbatched(model, dataset)
    else:
        # Labels that are not classes are fine if the model is compiled.
        dataset, problem = load_either(load)
        if problem is not None and source.name in models.NAMES:
            raise problem
        try:
            model = make(dataset.input_shape, dataset.num_classes)
        except Exception as error:
            if problem is not None:
                raise ValueError(f"{problem} {_OTHER_TASK}") from problem
            if source.name in models.NAMES:
                raise ValueError(
                    f"model={source.name} does not take the examples of dataset={dataset.name}, "
                    f"of shape {dataset.input_shape}: {one_line(error)}. Name another model."
                ) from error
            raise
    if problem is not None and not model.compiled:
        raise ValueError(f"{problem} {_OTHER_TASK}") from problem
    if dataset.num_classes == 1 and not model.compiled:  # its loss would be 0 from the start
        name = f", {dataset.class_names[0]}" if dataset.class_names else ""
        raise ValueError(
            f"dataset={dataset.name} has one class{name}, and a classifier needs at least two. Add "
            "examples of another class, or compile the model with the loss that it needs."
        )
    return model, dataset


def load_either(load: Callable[..., Dataset]) -> tuple[Dataset, ValueError | None]:
    """Returns a classifier's data, else data for a custom loss with the classifier's error."""
    try:
        return load(custom_loss=False), None
    except ValueError as error:
        try:
            return load(custom_loss=True), error
        except ValueError:
            raise error from None


def _check_unbatched(model: keras.Model, dataset: Dataset) -> None:
    """Raises ValueError for a tf.data.Dataset whose elements seem to be batches.

    If the model has known inputs, elements are batches if their shapes fit the inputs. If it is not
    built, they are if `batch` was the last call, or if the first size of every part is unknown.
    """
    if not isinstance(dataset.train, tf.data.Dataset):
        return
    spec = dataset.train.element_spec
    shapes = [tf.TensorShape(part.shape) for part in tf.nest.flatten(spec)]
    x = tf.nest.flatten(keras.utils.unpack_x_y_sample_weight(spec)[0])
    found = [tf.TensorShape(part.shape) for part in x]
    inputs = [tf.TensorShape(part.shape) for part in tf.nest.flatten(getattr(model, "inputs", []))]
    if 0 in (shape.rank for shape in shapes) or None in (shape.rank for shape in shapes):
        return
    if inputs:
        fits = [a.rank == b.rank and a[1:].is_compatible_with(b[1:]) for a, b in zip(found, inputs)]
        are_batches = len(found) == len(inputs) and all(fits)
    else:
        is_open = all(shape[0] is None for shape in shapes)
        are_batches = not model.built and (is_open or ends_in_batch(dataset.train))
    if are_batches:
        raise ValueError(
            f"dataset ({dataset.name}): its elements seem to be batches: x has shape {found[0]}. "
            "Remove .batch(), or add .unbatch(); `batch_size` says how many examples make a batch. "
            "If an element is one example, set its sizes with tf.ensure_shape."
        )
