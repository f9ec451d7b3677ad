"""--evaluate and --predict: what a saved model makes of the test data, computed on all towers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.app import datasets, models, named
from towers.app.after_training import export, prediction_files
from towers.app.after_training.model_files import class_names
from towers.app.config import TrainConfig
from towers.app.datasets import image_folder
from towers.app.datasets.batches import Examples, load_examples, ordered_batches
from towers.app.datasets.pixels import suited
from towers.app.datasets.dataset import Dataset
from towers.resume.source import InputOptions, num_steps
from towers.machine.devices import place_towers
from towers.machine.words import counted
from towers.workers.workers import join_workers
from towers.parallel.parallel_model import parallel_on
from towers.app.models import load_file
from towers.app.reporting.formats import format_loss, format_seconds
from towers.app.reporting.report import Report, devices_line, labelled, share_line
from towers.app.training.build import find_devices
from towers.app.training.pace import Pace
from towers.app.training.user_objects import PYTHON

_HOME = "/cpu:0"


def evaluate_file(config: TrainConfig, file: Path, out: Report) -> dict[str, float]:
    """The loss and the metrics that a file was compiled with, of all test examples; its export.

    Args:
        config: the data, the batch and the devices.
        file: of the model.
        out: where the lines go.

    Raises:
        ValueError: the file, the data or the devices cannot be used, or the model has no loss.
    """
    parallel, examples, dataset, batch_size = _prepare(
        config, file, out, "evaluate", compile=True
    )
    if not parallel.compiled:
        raise ValueError(f"evaluate ({file}): the model was saved without a loss; compile it.")
    began = time.perf_counter()
    parallel.make_test_function()
    last: dict[str, Any] = {}  # the means over all batches so far

    def test(batch: Any) -> None:
        last.update(parallel.test_function(iter([batch])))

    _for_each_batch(test, examples, batch_size, "Evaluate", out)
    logs = {name: float(last[name]) for name in sorted(last, key=lambda name: name != "loss")}
    values = "  ".join(f"{name} {format_loss(value)}" for name, value in logs.items())
    seconds, count = format_seconds(time.perf_counter() - began), examples.num_examples
    out.line(labelled("Evaluate", f"{values} | {counted(count, 'example')} in {seconds}"))
    _export(config, file, dataset, out)
    return logs


def predict_file(config: TrainConfig, file: Path, path: str, out: Report) -> None:
    """Writes the model's outputs for all test examples, in their order, to a new file; its export.

    Args:
        config: the data, the batch and the devices.
        file: of the model.
        path: see `prediction_files.prediction_file`.
        out: where the lines go.

    Raises:
        ValueError: the files, the data or the devices cannot be used.
    """
    prediction_files.check(path)
    classes = class_names(file)
    parallel, examples, dataset, batch_size = _prepare(
        config, file, out, "predict", compile=False
    )
    outputs, count, files = _output_names(parallel), examples.num_examples, dataset.test_names
    with prediction_files.prediction_file(path, outputs, count, files, classes) as predictions:

        def predict(batch: Any) -> None:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            values = tf.nest.flatten(parallel.predict_on_batch(x))
            predictions.add([_plain(value) for value in values])

        _for_each_batch(predict, examples, batch_size, "Predict", out)
    out.line(labelled("Predict", f"{counted(examples.num_examples, 'example')}: {path}"))
    _export(config, file, dataset, out)


def _export(config: TrainConfig, file: Path, dataset: Dataset, out: Report) -> None:
    """Exports the file's model, if the configuration says so."""
    if config.export is not None:
        for line in export.export_model(
            file, config.export, class_names(file), dataset.divided_for_model, config.export_pixels
        ):
            out.line(line)


def _prepare(
    config: TrainConfig, file: Path, out: Report, argument: str, *, compile: bool
) -> tuple[keras.Model, Examples, Dataset, int]:
    """The model on towers, the test examples, the data set that they are of, the global batch."""
    export.check(config.export, config.export_pixels)
    workers = join_workers().num_workers
    if workers > 1:
        raise ValueError(
            f"{argument} ({file}) works with one worker, and the environment names {workers}. "
            "Unset TF_CONFIG for it."
        )
    devices = find_devices(config)
    if ":" in config.model:  # its module may register layers
        named.import_module(config.model, "model")
    with tf.device(_HOME):
        model = load_file(file, argument, compile=compile)
    examples, dataset = _test_examples(config, model, file, argument)
    if config.export_pixels:
        export.check_pixels(model, dataset.divided_for_model)
    num_towers, each = config.num_towers_on(len(devices)), config.gpus_per_tower
    out.line(devices_line(_HOME, place_towers(num_towers, devices[::each]), stages=each))
    out.line(labelled("Model", f"{file}, {model.count_params():,} parameters"))
    out.line(labelled("Data", f"{config.dataset}: {examples.num_examples:,} test"))
    for note in dataset.notes:
        out.line(labelled("", note))
    for warning in dataset.warnings:
        out.warn(warning)
    batch_size = config.global_batch_size(len(devices))
    parallel = parallel_on(
        model, devices, num_towers, gpus_per_tower=each, stages=config.stage_names
    )
    return parallel, examples, dataset, batch_size


def _test_examples(
    config: TrainConfig, model: keras.Model, file: Path, argument: str
) -> tuple[Examples, Dataset]:
    """The test examples, and the data set that they are of."""
    shapes = (getattr(model, "input_shape", None), getattr(model, "output_shape", None))
    shape, outputs = (s[1:] if isinstance(s, tuple) else None for s in shapes)
    dataset = None
    if argument == "predict" and config.dataset == "image_folder":
        dataset = image_folder.load_flat(config.data_dir, shape or ())
    if dataset is None:
        dataset = _load(config, shape or (28, 28, 1), outputs[-1] if outputs else 10)
    if dataset.test is None:
        raise ValueError(f"{argument} ({file}): dataset={config.dataset} has no test examples.")
    found = dataset.input_shape
    if shape is not None and found is not None and not _fits(shape, found):
        raise ValueError(
            f"{argument} ({file}) takes inputs of shape {shape}, and dataset={config.dataset} has "
            f"{found}."
        )
    options = InputOptions(None, config.data_workers, config.data_timeout)
    dataset = suited(dataset, model)
    return load_examples(dataset.test, options, dataset.restored), dataset


def _load(config: TrainConfig, input_shape: tuple[int, ...], num_classes: int) -> Dataset:
    """The data as training has taken them: of classes if they can be, see `task`."""

    def load(own_task: bool) -> Dataset:
        return datasets.load(
            config.dataset, config.data_dir, input_shape=input_shape, num_classes=num_classes,
            own_task=own_task, features=config.features, image_size=config.image_shape,
        )

    if config.model != PYTHON:
        source = models.load(config.model)
        if source.knows_shapes:
            return load(own_task=source.build(None, None).compiled)
    try:
        return load(own_task=False)
    except ValueError as problem:
        try:
            return load(own_task=True)
        except ValueError:
            raise problem from None


def _fits(shape: tuple[int | None, ...], data_shape: tuple[int, ...]) -> bool:
    """Whether data of one shape are what a model takes; None is any size."""
    pairs = zip(shape, data_shape, strict=False)
    return len(shape) == len(data_shape) and all(a in (None, b) for a, b in pairs)


def _for_each_batch(
    action: Callable[[Any], None], examples: Examples, batch_size: int, label: str, out: Report
) -> None:
    """Does it for each global batch, in order, and shows how far it is."""
    total = examples.num_examples
    pace = Pace(num_steps(total, batch_size), 1)
    for done, batch in _counted(ordered_batches(examples, batch_size), batch_size, total):
        action(batch)
        pace.add_step(min(batch_size, total - done))
        if out.is_due():
            now = min(done + batch_size, total), total, pace.examples_per_second, pace.seconds_left
            out.ongoing(share_line(label, *now), share_line(label, *now, with_bar=True))


def _counted(batches: Any, batch_size: int, total: int) -> Iterator[tuple[int, Any]]:
    """Each batch, and how many examples there were before it."""
    yield from zip(range(0, total, batch_size), batches, strict=True)


def _output_names(model: keras.Model) -> list[str]:
    """"predictions" of one output; of several their names, or their numbers."""
    outputs = getattr(model, "output", None)
    count = len(tf.nest.flatten(outputs))
    if count == 1:
        return ["predictions"]
    names = sorted(outputs) if isinstance(outputs, dict) else getattr(model, "output_names", [])
    return list(names) if len(set(names)) == count else [f"output_{i}" for i in range(count)]


def _plain(output: Any) -> np.ndarray:
    """The array in a dtype that NumPy's files know, unlike bfloat16."""
    array = np.asarray(output)
    return array.astype(np.float32) if array.dtype.kind == "V" else array
