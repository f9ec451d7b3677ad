"""Writes the ledger of a training: every few steps, digests of all that the next steps depend on.

    epoch,step,parameters,batch,seeds
    1,20,31d0a5f7c2b94e68,0c5e9b1f7a2d4830,b7f3e9d2c4a61508       after step 20
    1,40,...

Equal trainings write equal lines, on any number of devices. The first line that differs tells
within a few steps where two trainings part. A training that resumes first drops the lines of later
steps than its own, because it makes these steps again.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.machine import files, hang
from towers.resume import directories
from towers.step.digests import as_digits, sum_of_bits
from towers.step.structures import Structure, any_rows, as_tensor, map_tensors

LEDGER = "ledger.csv"
_LARGEST = 2**28  # bytes; a line takes 60


class Line(NamedTuple):
    """Holds a line: digests are 16 hexadecimal digits. The names of the fields are the columns."""

    epoch: int  # from 1, as in results.csv
    step: int  # updates in all epochs
    parameters: str  # of `model.weights` after the step
    batch: str  # of the step's x, y and sample_weight; "" if each worker has only its own rows
    seeds: str  # of the states of all `keras.random.SeedGenerator` after the step


class LedgerFile:
    """Adds lines to a ledger. If that fails, it warns and stops; training continues."""

    def __init__(
        self, path: Path, model: keras.Model, every: int, warn: Callable[[str], None]
    ) -> None:
        """every: the number of steps between two lines."""
        self._path, self._every, self._warn = path, every, warn
        self._digests = digests_of(model)
        self._is_open = self._has_failed = False

    def add(self, epoch: int, step: int, before: int, batch: Callable[[], Structure]) -> None:
        """Writes a line after `step` updates if one is due; call it after every update.

        epoch: from 1. before: the updates that were done at the previous call, or when training
            began. batch: returns the newest batch, or None.
        """
        is_due = step // self._every > before // self._every
        if self._has_failed or self._is_open and not is_due:
            return
        try:
            with hang.within(f"writing {self._path.name}"):
                if not self._is_open:
                    self._cut(before)
                if is_due:
                    line = Line(epoch, step, *self._digests(batch()))
                    with files.open_to_append(self._path) as file:
                        file.write(_as_text(line).encode())
        except OSError as error:
            self._has_failed = True
            self._warn(f"{self._path} cannot be written ({error.strerror}); training continues.")

    def _cut(self, step: int) -> None:
        """Drops the lines of later steps, and a line that a killed process has not completed."""
        kept = [line for line in read_ledger(self._path) if line.step <= step]
        text = "".join(map(_as_text, (Line._fields, *kept)))
        directories.write_text(self._path, text)
        self._is_open = True


def _as_text(cells: Iterable[object]) -> str:
    return ",".join(map(str, cells)) + "\n"


def read_ledger(path: Path) -> list[Line]:
    """Returns the complete lines of a ledger up to the first other one; [] if there is no file."""
    try:
        text = files.read(path, _LARGEST).decode(errors="replace")
    except FileNotFoundError:
        return []
    lines: list[Line] = []
    for row in text.splitlines(keepends=True)[1:]:
        epoch, _, rest = row.partition(",")
        step, *digests = rest.rstrip("\n").split(",")
        numbers = (epoch + step).isdecimal() and len(digests) == len(Line._fields) - 2
        if not numbers or not row.endswith("\n"):
            break
        lines.append(Line(int(epoch), int(step), *digests))
    return lines


def digests_of(model: keras.Model) -> Callable[[Structure], tuple[str, str, str]]:
    """Returns a function batch -> digests of the model's parameters, the batch, and the seeds.

    The function is traced once for batches of any number of rows. None has the digest "".
    """
    weights = list(model.weights)
    known = {id(weight) for weight in weights}
    # Keras lists metrics here as well, whose sums are floats.
    states = [v for v in model.variables if id(v) not in known and "int" in v.dtype]

    def read(variable: keras.Variable) -> tf.Tensor:
        with tf.device(variable.value.device):
            return variable.value.read_value()

    def sums(batch: Structure) -> tf.Tensor:
        parts = [[read(v) for v in weights], batch, [read(v) for v in states]]
        return tf.stack([sum_of_bits(part) for part in parts])

    traced: dict[str, Callable] = {}

    def digests(batch: Structure) -> tuple[str, str, str]:
        tensors = map_tensors(as_tensor, batch)
        specs = map_tensors(any_rows, tensors)
        if str(specs) not in traced:
            function = tf.function(sums, autograph=False)
            traced[str(specs)] = function.get_concrete_function(specs)
        parameters, of_batch, seeds = map(as_digits, traced[str(specs)](tensors).numpy())
        return parameters, "" if batch is None else of_batch, seeds

    return digests
