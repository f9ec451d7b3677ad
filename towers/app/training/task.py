"""Makes a run's model and data, in an order that depends on the model.

    function of (input_shape, num_classes)    the data, then the model
    any other model                           the model, then the data, which have class labels
                                              unless the model is compiled
"""

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from towers.app import datasets, models
from towers.app.config import TrainConfig
from towers.app.datasets.dataset import Dataset
from towers.app.datasets.user import from_splits
from towers.machine.tensorflow_internals import ends_in_batch
from towers.app.models import ModelSource
from towers.app.named import one_line
from towers.app.training.user_objects import PYTHON, UserObjects


def find_source(config: TrainConfig, objects: UserObjects) -> ModelSource:
    """Returns the source of the model, without building it.

    Raises:
        ValueError: the model is already made and `precision` is set, or `models.load` raises it.
    """
    model = objects.model
    if model is not None:
        source = ModelSource(PYTHON, lambda *_: model, knows_shapes=True)
    else:
        source = models.load(config.model)
    is_made = model is not None or config.model.endswith(".keras")
    if is_made and config.precision != "float32":
        raise ValueError(
            f"precision ({config.precision}) has no effect on model ({source.name}), whose layers "
            "are made: leave it out; they keep their own."
        )
    return source


def make_model_and_data(
    config: TrainConfig, source: ModelSource, objects: UserObjects, parameter_device: str
) -> tuple[keras.Model, Dataset]:
    """Makes the model, which may not be built or compiled yet, and its data.

    Args:
        config: the run's configuration.
        source: makes the model.
        objects: the model and data that Python code passed instead of names, if any.
        parameter_device: the device of the model's variables.

    Raises:
        ValueError: the model or the data cannot be made, or they do not fit each other.
    """

    def make(input_shape: Any, num_classes: int | None) -> keras.Model:
        keras.utils.set_random_seed(config.seed)
        with tf.device(parameter_device):
            model = source.build(input_shape, num_classes)
        if not isinstance(model, keras.Model):
            raise ValueError(
                f"model ({source.name!r}) returned {type(model).__name__}; it must be a "
                "keras.Model."
            )
        return model

    def load(source: ModelSource, custom_loss: bool) -> Dataset:
        if objects.train is not None:
            return from_splits(PYTHON, objects.train, objects.test, custom_loss=custom_loss)
        return datasets.load(
            config.dataset, config.data_dir, input_shape=source.input_shape,
            num_classes=source.num_classes, custom_loss=custom_loss, features=config.features,
            image_size=config.image_shape,
        )

    if source.knows_shapes:
        model = make(None, None)
        dataset = load(_sizes(source, model), model.compiled)
        _check_unbatched(model, dataset)
        _check_classes(config, model, dataset)
        return model, dataset
    problem: ValueError | None = None
    try:
        dataset = load(source, False)
    except ValueError as error:
        if source.name in models.NAMES:
            raise
        problem = error  # labels that are not classes are fine if the model is compiled
        try:
            dataset = load(source, True)
        except ValueError:
            raise problem from None
    try:
        model = make(dataset.input_shape, dataset.num_classes)
    except Exception as error:
        if problem is None:
            raise
        raise ValueError(
            f"{problem} Asked for a model for other labels, {source.name} raised {one_line(error)}."
        ) from error
    if problem is not None and not model.compiled:
        raise problem
    _check_classes(config, model, dataset)
    return model, dataset


def _sizes(source: ModelSource, model: keras.Model) -> ModelSource:
    """Adds the sizes of a model with one input and one output to its source, for synthetic data."""
    x, y = (getattr(model, name, None) for name in ("input_shape", "output_shape"))
    if isinstance(x, tuple) and isinstance(y, tuple) and None not in (*x[1:], y[-1]):
        return source._replace(input_shape=x[1:], num_classes=y[-1])
    return source


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
        fits = [a.rank == b.rank and a[1:].is_compatible_with(b[1:])
                for a, b in zip(found, inputs)]
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


def _check_classes(config: TrainConfig, model: keras.Model, dataset: Dataset) -> None:
    """Raises ValueError for a classifier of one class, whose loss would be 0 from the start."""
    if model.compiled or dataset.num_classes != 1:
        return
    named = f", {dataset.class_names[0]}" if dataset.class_names else ""
    deeper = ""
    if dataset.name == "image_folder":
        folder = Path(config.data_dir or "", dataset.class_names[0])
        deeper = f" If that folder holds the classes' folders, give data_dir={folder}."
    raise ValueError(
        f"dataset={dataset.name} has one class{named}, and a classifier needs at least two. Add "
        f"examples of another class, or compile the model with the loss that it needs.{deeper}"
    )
