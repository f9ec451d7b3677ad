"""Files that predictions are written to, batch after batch: .npz, or .csv of labels."""

import csv
import os
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

_SUFFIXES = (".npz", ".csv")
_LARGEST_DEVIATION = 1e-2  # of a sum of probabilities from 1: bfloat16's rounding


def check(path: str) -> None:
    """Raises ValueError for a file that exists already, or has another suffix."""
    if not path.endswith(_SUFFIXES):
        raise ValueError(f"out ({path}) must end in {' or '.join(_SUFFIXES)}.")
    if Path(path).exists():
        raise ValueError(f"out ({path}) exists already; name a new file.")


def write(
    path: str,
    batches: Iterable[Sequence[np.ndarray]],
    names: Sequence[str],
    num_examples: int,
    files: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> None:
    """Writes a file of predictions, which appears when it is complete.

    Args:
        path: ending in .npz: arrays [N, ...]; in .csv: "file,label,class,probability" of the most
            probable class, without what is not known.
        batches: the model's outputs for the next examples, [n, ...] each.
        names: the outputs' names, which the arrays get.
        num_examples: N.
        files: the examples' names, N; () for none.
        class_names: by label; () for none.

    Raises:
        ValueError: the file cannot be written, or the predictions do not suit it.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            complete = Path(folder) / target.name
            if target.suffix == ".npz":
                _write_npz(complete, batches, names, num_examples)
            else:
                _write_csv(complete, batches, files, class_names)
            os.replace(complete, target)
    except OSError as error:
        raise ValueError(f"out ({path}) cannot be written: {error.strerror}.") from error


def _write_npz(
    path: Path, batches: Iterable[Sequence[np.ndarray]], names: Sequence[str], num_examples: int
) -> None:
    """Fills arrays on the disk row by row, then puts them into one archive."""
    files = [path.with_name(f"{name}.npy") for name in names]
    arrays: list[np.ndarray] = []
    done = 0
    for outputs in batches:
        arrays = arrays or [
            np.lib.format.open_memmap(file, "w+", output.dtype, (num_examples, *output.shape[1:]))
            for file, output in zip(files, outputs, strict=True)
        ]
        for array, output in zip(arrays, outputs, strict=True):
            array[done:done + len(output)] = output
        done += len(outputs[0])
    arrays.clear()
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.write(file, file.name)
            file.unlink()


def _write_csv(
    path: Path, batches: Iterable[Sequence[np.ndarray]], files: Sequence[str],
    class_names: Sequence[str],
) -> None:
    known = {"file": files, "label": True, "class": class_names, "probability": True}
    # A file's name may be no text: its bytes stay.
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        columns = [name for name, is_known in known.items() if is_known]
        rows = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        rows.writeheader()
        done = 0
        for outputs in batches:
            for probabilities in _checked_probabilities(outputs):
                label = int(probabilities.argmax())
                rows.writerow({
                    "file": files[done] if files else "",
                    "label": label,
                    # A model may have more outputs than there were classes.
                    "class": class_names[label] if label < len(class_names) else "",
                    "probability": f"{probabilities[label]:.6g}",
                })
                done += 1


def _checked_probabilities(outputs: Sequence[np.ndarray]) -> np.ndarray:
    """The one output, [n, classes]."""
    values = outputs[0]
    if len(outputs) == 1 and values.ndim == 2 and (values >= 0).all():
        deviation = np.abs(values.sum(axis=1, dtype=np.float64) - 1.0)
        if (deviation <= _LARGEST_DEVIATION).all():
            return values
    raise ValueError(
        "a .csv file takes the probabilities of one output's classes, which add up to 1 for each "
        f"example; this model's outputs have shapes {[list(output.shape) for output in outputs]}. "
        "Use a file that ends in .npz."
    )
