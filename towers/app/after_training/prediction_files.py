"""Files that predictions go to, batch after batch: .npz, or .csv of labels.

A file is there when it is complete: until then its parts lie in a temporary directory beside it.
"""

import csv
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

_SUFFIXES = (".npz", ".csv")
_LARGEST_DEVIATION = 1e-2  # of a sum of probabilities from 1: bfloat16's rounding


class PredictionFile(Protocol):
    """Takes predictions in the order of the examples."""

    def add(self, outputs: Sequence[np.ndarray]) -> None:
        """Args: the model's outputs for the next examples, [n, ...] each."""

    def close(self) -> Path:
        """Completes the temporary file; returns its path."""


def check(path: str) -> None:
    """Raises ValueError for a file that there is already, or of another kind."""
    if not path.endswith(_SUFFIXES):
        raise ValueError(f"out ({path}) must end in {' or '.join(_SUFFIXES)}.")
    if Path(path).exists():
        raise ValueError(f"out ({path}) exists already; name a new file.")


@contextmanager
def prediction_file(
    path: str,
    names: Sequence[str],
    num_examples: int,
    files: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> Iterator[PredictionFile]:
    """A file of predictions; an exception leaves nothing behind.

    Args:
        path: ending in .npz: arrays [N, ...]; in .csv: a row an example, see `_Csv`.
        names: of the model's outputs, the arrays' names.
        num_examples: N.
        files: the examples' names, N; () for none. They stand in a .csv file alone.
        class_names: by label; () for none. The same.

    Raises:
        ValueError: the file cannot be written, or the predictions do not suit it.
    """
    target = Path(path)
    directory = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        file: PredictionFile = (
            _Npz(directory, names, num_examples)
            if target.suffix == ".npz"
            else _Csv(directory, files, class_names)
        )
        yield file
        os.replace(file.close(), target)
    except OSError as error:
        raise ValueError(f"out ({path}) cannot be written: {error.strerror}.") from error
    finally:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


class _Npz:
    """Arrays on the disk that are filled row by row, and then put into one archive."""

    def __init__(self, directory: Path, names: Sequence[str], num_examples: int) -> None:
        self._directory, self._names, self._num_examples = directory, list(names), num_examples
        self._arrays: list[np.ndarray] = []
        self._done = 0

    def add(self, outputs: Sequence[np.ndarray]) -> None:
        """Args: [n, ...] each."""
        if not self._arrays:
            self._arrays = [
                np.lib.format.open_memmap(
                    self._path(name), "w+", output.dtype, (self._num_examples, *output.shape[1:])
                )
                for name, output in zip(self._names, outputs, strict=True)
            ]
        end = self._done + len(outputs[0])
        for array, output in zip(self._arrays, outputs, strict=True):
            array[self._done:end] = output
        self._done = end

    def close(self) -> Path:
        """Writes the archive."""
        self._arrays.clear()
        path = self._directory / "predictions.npz"
        with zipfile.ZipFile(path, "w") as archive:
            for name in self._names:
                archive.write(self._path(name), f"{name}.npy")
        return path

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.npy"


class _Csv:
    """"label,probability": the most probable class of each example.

    With the examples' names, "file" comes first; with the classes' names, "class" after the label:
    "file,label,class,probability".
    """

    def __init__(self, directory: Path, files: Sequence[str], class_names: Sequence[str]) -> None:
        self._path = directory / "predictions.csv"
        self._files, self._class_names, self._done = files, class_names, 0
        # A file's name may be no text: its bytes stay.
        self._file = self._path.open("w", encoding="utf-8", errors="surrogateescape", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._write("file", "label", "class", "probability")

    def _write(self, file: str, label: object, class_name: str, probability: str) -> None:
        before = [file] if self._files else []
        between = [class_name] if self._class_names else []
        self._rows.writerow([*before, label, *between, probability])

    def add(self, outputs: Sequence[np.ndarray]) -> None:
        """Args: one output, [n, classes]."""
        probabilities = outputs[0]
        if len(outputs) > 1 or probabilities.ndim != 2 or not _are_probabilities(probabilities):
            raise ValueError(
                "a .csv file takes the probabilities of one output's classes, which add up to 1 "
                f"for each example; this model's outputs have shapes "
                f"{[list(output.shape) for output in outputs]}. Use a file that ends in .npz."
            )
        labels = probabilities.argmax(axis=1)
        highest = probabilities.max(axis=1)
        for label, probability in zip(labels, highest, strict=True):
            file = self._files[self._done] if self._files else ""
            # A model may have more outputs than there were classes.
            name = self._class_names[label] if label < len(self._class_names) else ""
            self._write(file, label, name, f"{probability:.6g}")
            self._done += 1

    def close(self) -> Path:
        """Writes what is left."""
        self._file.close()
        return self._path


def _are_probabilities(values: np.ndarray) -> bool:
    deviation = np.abs(values.sum(axis=1, dtype=np.float64) - 1.0)
    return bool((values >= 0).all() and (deviation <= _LARGEST_DEVIATION).all())
