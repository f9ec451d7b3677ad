"""Loads melodies: 18,571 training and 2,803 test examples of 49 MIDI notes and the next note."""

import io
import os
from pathlib import Path

import numpy as np

from towers.app.datasets.dataset import Arrays, Dataset
from towers.app.named import reading
from towers.machine import files

NUM_CLASSES, NUM_STEPS = 128, 49
EMBEDDED_DIR = Path(__file__).parent / "data" / "music"
FILE_NAMES = ("train.csv.gz", "val.csv.gz")


def load(data_dir: str | os.PathLike | None = None) -> Dataset:
    """Loads notes as numbers: x int32 [N, 49] and y int32 [N], all in 0 ... 127.

    One-hot, x would be 128 times as large. A model therefore encodes it on its device: it begins
    with `Embedding(128, ...)` or `CategoryEncoding(128, output_mode="one_hot")`.

    data_dir: a directory with train.csv.gz and val.csv.gz, whose rows have 50 notes each; None
        means the embedded files.
    """
    directory = Path(data_dir or EMBEDDED_DIR)
    train, test = (_read(directory / name) for name in FILE_NAMES)
    return Dataset("music", train, test, NUM_CLASSES, (NUM_STEPS,))


def _read(path: Path) -> Arrays:
    with reading(path, "Copy it again."):
        text = io.StringIO(files.read_gzip(path).decode())
        notes = np.loadtxt(text, delimiter=",", dtype=np.int32, ndmin=2)
        if notes.shape[0] == 0 or notes.shape[1] != NUM_STEPS + 1:
            raise ValueError(f"it has {notes.shape[0]} rows of {notes.shape[1]} notes, not of 50")
        if len(wrong := np.argwhere((notes < 0) | (notes >= NUM_CLASSES))):
            row, note = wrong[0]
            raise ValueError(f"note {note} of row {row} is {notes[row, note]}, not in 0 to 127")

    return np.ascontiguousarray(notes[:, :-1]), np.ascontiguousarray(notes[:, -1])
