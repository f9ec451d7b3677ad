"""Writes predictions to files: .npz with arrays, or .csv with labels."""

import csv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from towers.resume.run_dir import write_atomically

_SUFFIXES = (".npz", ".csv")
_LARGEST_DEVIATION = 1e-2  # probabilities add up to 1 up to this error: bfloat16's rounding


def check(path: str) -> None:
    """Raises ValueError if the file exists already, or has another suffix."""
    if not path.endswith(_SUFFIXES):
        raise ValueError(f"out ({path}) must end in {' or '.join(_SUFFIXES)}.")
    if Path(path).exists():
        raise ValueError(f"out ({path}) exists already; name a new file.")


def write(
    path: str, outputs: Mapping[str, np.ndarray], files: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> None:
    """Writes a file of predictions, which appears when it is complete.

    Args:
        path: an .npz file gets the arrays, a .csv file "file,label,class,probability" of the most
            probable class; unknown columns are left out.
        outputs: a model's outputs for N examples, [N, ...] each, by name.
        files: the N examples' file names, or ().
        class_names: the classes' names by label, or ().

    Raises:
        ValueError: the file cannot be written, or the outputs cannot be written to a .csv file.
    """
    target = Path(path)

    def write_to(file: Path) -> None:
        if target.suffix == ".csv":
            _write_csv(file, list(outputs.values()), files, class_names)
            return
        with zipfile.ZipFile(file, "w") as archive:  # numpy.savez rejects some names
            for name, output in outputs.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, output)

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, write_to)
    except OSError as error:
        raise ValueError(f"out ({path}) cannot be written: {error.strerror}.") from error


def _write_csv(
    path: Path, outputs: Sequence[np.ndarray], files: Sequence[str], class_names: Sequence[str]
) -> None:
    values = outputs[0]
    is_one = len(outputs) == 1 and values.ndim == 2 and bool((values >= 0).all())
    if not is_one or (
        np.abs(values.sum(axis=1, dtype=np.float64) - 1.0) > _LARGEST_DEVIATION
    ).any():
        raise ValueError(
            "a .csv file takes the probabilities of one output's classes, which add up to 1 for "
            "each example; this model's outputs have shapes "
            f"{[list(output.shape) for output in outputs]}. Use a file that ends in .npz."
        )
    labels, names = values.argmax(axis=1).tolist(), dict(enumerate(class_names))
    columns: dict[str, Sequence[object]] = {
        "file": files,
        "label": labels,
        # A model may have more outputs than there were classes.
        "class": [names.get(label, "") for label in labels] if names else (),
        "probability": [f"{probability:.6g}" for probability in values.max(axis=1)],
    }
    known = {name: column for name, column in columns.items() if column}
    # A file's name may not be valid UTF-8; its bytes are kept.
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(known)
        rows.writerows(zip(*known.values(), strict=True))
