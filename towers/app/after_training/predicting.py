"""Runs --evaluate and --predict: a saved model on the test data, on all towers."""

import csv
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from towers.app import datasets, models, named
from towers.app.after_training import confusion, export
from towers.app.after_training.model_files import class_names
from towers.app.config import TrainConfig
from towers.app.datasets import image_folder
from towers.app.datasets.batches import load_examples
from towers.resume.epoch import Epoch
from towers.app.datasets.dataset import Dataset
from towers.app.datasets.pixels import scale_for_model
from towers.app.reporting.report import Report, devices_line, format_loss, format_seconds, labelled
from towers.app.training.build import find_devices, reads_own_rows
from towers.app.training.task import PYTHON, load_either
from towers.machine.devices import place_towers
from towers.machine.words import counted, printable
from towers.parallel.parallel_model import parallel_on
from towers.resume.directories import explained, write_atomically
from towers.step.errors import values_explained
from towers.step.exchange import towers_of
from towers.step.placement import Placement
from towers.step.sharding import rows_of_towers
from towers.step.structures import Structure
from towers.step.xla import FullBatch
from towers.workers import watch
from towers.workers.workers import join_workers

_LARGEST_DEVIATION = 1e-2  # probabilities add up to 1 up to this error: bfloat16's rounding
_HOME = "/cpu:0"
_BATCH = "a batch of the test examples"


def evaluate_file(
    config: TrainConfig, file: Path, out: Report, path: str | None = None
) -> dict[str, float]:
    """Returns a saved model's loss and metrics over all test examples; exports it if configured.

    path: a new .png file for the confusion matrix of a classifier.

    Raises ValueError if file, data or devices cannot be used, or if the model has no loss.
    """
    check_new(path)
    model, dataset, count, batches = _prepare(config, file, out, "evaluate", path is not None)
    if not model.compiled:
        raise ValueError(f"evaluate ({file}): the model was saved without a loss; compile it.")
    began = time.perf_counter()
    model.make_test_function()
    means: dict[str, tf.Tensor] = {}  # over all batches so far
    counts = np.zeros((), int)
    for batch in batches:
        with values_explained(_BATCH):
            means = model.test_function(iter([batch]))
            if path is not None:
                x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
                counts = counts + confusion.count(y, model.predict_on_batch(x))
    logs = {name: float(means[name]) for name in sorted(means, key=lambda name: name != "loss")}
    values = "  ".join(f"{name} {format_loss(value)}" for name, value in logs.items())
    seconds = format_seconds(time.perf_counter() - began)
    out.line(labelled("Evaluate", f"{values} | {counted(count, 'example')} in {seconds}"))
    if path is not None and join_workers().is_chief:
        with explained(path, "out"):
            confusion.show(counts, Path(path), class_names(file), out)
    _export(config, file, dataset, out)
    return logs


def predict_file(config: TrainConfig, file: Path, path: str, out: Report) -> None:
    """Writes a saved model's outputs for all test examples, in order; exports it if configured.

    The new file `path` ends in .npz or .csv, see `write_predictions`.

    Raises ValueError if the files, the data or the devices cannot be used.
    """
    if not path.endswith((".npz", ".csv")):
        raise ValueError(f"out ({path}) must end in .npz or .csv.")
    check_new(path)
    classes = class_names(file)
    model, dataset, count, batches = _prepare(config, file, out, "predict")
    found = []
    for batch in batches:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with values_explained(_BATCH):
            found.append(model.predict_on_batch(x))
    if join_workers().is_chief:
        write_predictions(path, _named_outputs(model, found), dataset.test_names, classes)
    out.line(labelled("Predict", f"{counted(count, 'example')}: {path}"))
    _export(config, file, dataset, out)


def _named_outputs(model: keras.Model, found: Sequence[Structure]) -> dict[str, np.ndarray]:
    """Returns the outputs of all batches together, by the names of the model's outputs."""
    names = getattr(model, "output_names", [])
    if isinstance(found[0], dict):
        names = sorted(found[0])
    outputs = [np.concatenate(parts) for parts in zip(*map(tf.nest.flatten, found))]
    if len(outputs) == 1:
        names = ["predictions"]
    elif len(set(names)) != len(outputs):
        names = [f"output_{i}" for i in range(len(outputs))]
    return dict(zip(names, outputs, strict=True))


def check_new(path: Path | str | None) -> None:
    """Raises ValueError if a file exists that --out names."""
    if path is not None and Path(path).exists():
        raise ValueError(f"out ({path}) exists already; name a new file.")


def write_predictions(
    path: str,
    outputs: Mapping[str, np.ndarray],
    files: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> None:
    """Writes a model's outputs, [N, ...] each, to a file that appears when it is complete.

    An .npz file gets the arrays by name. A .csv file gets "file,label,class,probability" of the
    most probable class, without the columns that are not known. Raises ValueError if the file
    cannot be written, or the outputs cannot be written to a .csv file.
    """
    target = Path(path)

    def write_to(file: Path) -> None:
        if target.suffix == ".csv":
            _write_csv(file, list(outputs.values()), files, class_names)
            return
        with zipfile.ZipFile(file, "w") as archive:  # numpy.savez rejects some names
            for name, output in outputs.items():
                if output.dtype.kind == "V":  # bfloat16, which NumPy's files lack
                    output = output.astype(np.float32)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.save(member, output)

    with explained(path, "out"):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, write_to)


def _write_csv(
    path: Path, outputs: Sequence[np.ndarray], files: Sequence[str], class_names: Sequence[str]
) -> None:
    values = outputs[0].astype(np.float64)
    are_probabilities = len(outputs) == 1 and values.ndim == 2 and not (values < 0).any()
    if not are_probabilities or (abs(values.sum(axis=1) - 1) > _LARGEST_DEVIATION).any():
        raise ValueError(
            "a .csv file takes the probabilities of one output's classes, which add up to 1 for "
            "each example; this model's outputs have shapes "
            f"{[list(output.shape) for output in outputs]}. Use a file that ends in .npz."
        )
    labels, names = values.argmax(axis=1).tolist(), dict(enumerate(class_names))
    known: dict[str, Sequence[object]] = {"label": labels}
    if files:
        known = {"file": list(map(printable, files)), **known}
    if names:  # a model may have more outputs than there were classes
        known["class"] = [printable(names.get(label, "")) for label in labels]
    known["probability"] = [f"{probability:.6g}" for probability in values.max(axis=1)]
    # A file's name may not be valid UTF-8; its bytes are kept. Control characters are not, because
    # `cat` would send them to the terminal.
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(known)
        rows.writerows(zip(*known.values(), strict=True))


def _export(config: TrainConfig, file: Path, dataset: Dataset, out: Report) -> None:
    """Exports the file's model if `config.export` is set; then all workers may end."""
    if config.export is not None and join_workers().is_chief:
        divided = dataset.divided_for_model
        for line in export.export_model(file, config.export, class_names(file), divided):
            out.line(line)
    join_workers().barrier()


def _prepare(
    config: TrainConfig, file: Path, out: Report, argument: str, needs_labels: bool = False
) -> tuple[keras.Model, Dataset, int, Iterator[Structure]]:
    """Loads the file and the data, and prints the devices, the model and the data.

    Returns the model on towers; the data set, the number of its test examples, and their global
    batches, which show the progress.
    """
    export.check(config.export)
    workers, devices = join_workers(), find_devices(config)
    watch.set_timeout(config.worker_timeout)
    keras.utils.set_random_seed(config.seed)  # the layers' random generators are not in the file
    if ":" in config.model:  # its module may register layers
        named.import_module(config.model, "model")
    with tf.device(_HOME):
        model = models.load_file(file, argument, compile=argument == "evaluate")
    dataset = _test_data(config, model, file, argument)
    reading = TrainConfig(data_workers=config.data_workers)
    examples = load_examples(dataset.test, reading, dataset.restored)
    num_devices, each = len(devices) * workers.num_workers, config.gpus_per_tower
    num_towers, total = config.num_towers_on(num_devices), examples.num_examples
    local = towers_of(workers.index, workers.num_workers, num_towers)
    places = place_towers(len(local), devices[::each])
    out.line(devices_line(_HOME, places, local.start, stages=each))
    out.line(labelled("Model", f"{file}, {model.count_params():,} parameters"))
    out.line(labelled("Data", f"{config.dataset}: {total:,} test"))
    for note in dataset.notes:
        out.line(labelled("", note))
    for warning in dataset.warnings:
        out.warn(warning)
    # A worker that reads only its own examples would lack the labels of the others.
    own_rows = reads_own_rows(examples) and not needs_labels
    size = config.global_batch_size(num_devices)
    parallel = parallel_on(
        model,
        devices,
        num_towers,
        Placement(gpus_per_tower=each, stages=config.stage_names, add_on=config.add_on),
        own_rows=own_rows,
        full_batch=FullBatch(size),
    )
    rows = partial(rows_of_towers, num_towers, local) if own_rows else None

    def batches() -> Iterator[Structure]:
        for step, batch in enumerate(examples.batches(Epoch(size, rows=rows)), 1):
            yield batch
            if out.is_due():
                done = f"{min(step * size, total):,}/{total:,}"
                out.ongoing(labelled(argument.capitalize(), done))

    return parallel, dataset, total, batches()


def _test_data(config: TrainConfig, model: keras.Model, file: Path, argument: str) -> Dataset:
    """Returns the data set; raises ValueError if the model cannot take its test examples."""
    shape, outputs = (getattr(model, name, None) for name in ("input_shape", "output_shape"))
    shape = shape[1:] if isinstance(shape, tuple) else None
    dataset = None
    if argument == "predict" and config.dataset == "image_folder":
        dataset = image_folder.load_flat(config.data_dir, shape or ())
    if dataset is None:
        load = partial(
            datasets.load,
            config.dataset,
            config.data_dir,
            input_shape=shape or (28, 28, 1),
            num_classes=(isinstance(outputs, tuple) and outputs[-1]) or 10,
            image_size=config.image_shape,
        )
        if config.model != PYTHON and (source := models.load(config.model)).knows_shapes:
            dataset = load(custom_loss=source.build(None, None).compiled)
        else:
            dataset, _ = load_either(load)
    if dataset.test is None:
        raise ValueError(f"{argument} ({file}): dataset={config.dataset} has no test examples.")
    found = dataset.input_shape
    # A None in the model's shape matches any length.
    if shape is not None and not tf.TensorShape(shape).is_compatible_with(found):
        raise ValueError(
            f"{argument} ({file}) takes inputs of shape {shape}, and dataset={config.dataset} has "
            f"{found}."
        )
    return scale_for_model(dataset, model)
