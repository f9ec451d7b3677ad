"""Files that predictions are written to: .npz, or .csv of labels."""

import csv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from towers.resume.run_dir import write_atomically

_SUFFIXES = (".npz", ".csv")
_LARGEST_DEVIATION = 1e-2  # of a sum of probabilities from 1: bfloat16's rounding


def check(path: str) -> None:
    """Raises ValueError for a file that exists already, or has another suffix."""
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
        path: ending in .npz: the arrays; in .csv: "file,label,class,probability" of the most
            probable class, without what is not known.
        outputs: a model's outputs for N examples, [N, ...] each, by name.
        files: the examples' names, N; () for none.
        class_names: by label; () for none.

    Raises:
        ValueError: the file cannot be written, or the predictions do not suit it.
    """
    target = Path(path)

    def write_to(file: Path) -> None:
        if target.suffix == ".csv":
            _write_csv(file, list(outputs.values()), files, class_names)
            return
        with zipfile.ZipFile(file, "w") as archive:  # numpy.savez refuses some names
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
    # A file's name may be no text: its bytes stay.
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(known)
        rows.writerows(zip(*known.values(), strict=True))
