"""Examples of an iterable that has a state, in its own order: Grain's, torchdata's, anyone's.

    state 0 | batch 0 | state 1 | batch 1 | state 2 | batch 2 ...     read ahead of the steps
                                     ^ saved after step 1, and gone on from at once

An epoch is N examples; the iterable begins anew whenever it ends.
"""

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from towers.app.datasets import random_access
from towers.app.datasets.dataset import Found
from towers.app.datasets.random_access import RandomAccess
from towers.resume.source import Epoch, ExplainedBatches, InputOptions
from towers.resume.stateful import Repeated, methods


class Sized(NamedTuple):
    """An iterable, and the number of its examples that are an epoch."""

    iterable: Any
    num_examples: int


class InTurn:
    """Examples by their number: the next one, or one before which the state is known."""

    def __init__(self, row: Repeated, num_examples: int) -> None:
        self.row, self._num_examples = row, num_examples
        self.lock = threading.Lock()  # an iteration that was left may still read

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, number: int) -> Any:
        if number != self.row.at:
            self.row.go_to(number)
        return next(self.row)


class Stateful(RandomAccess):
    """N examples an epoch, of an endless row: (epoch, index) is at epoch * N + index."""

    how = "in an order of their own, which the checkpoints keep"

    def opened(self, options: InputOptions) -> "Stateful":
        """Raises ValueError for processes: there is one row."""
        if options.data_workers:
            raise ValueError(
                f"data_workers ({options.data_workers}): {self.source.where} is read in its own "
                "order, by one reader. Leave data_workers out; loaders of Grain and torchdata have "
                "workers of their own."
            )
        return self

    def batches(self, epoch: Epoch) -> ExplainedBatches:
        """The next examples of the row, whatever order is asked for."""
        return super().batches(epoch._replace(
            order=lambda count: lambda indices: indices + epoch.number * count
        ))

    def state(self, epoch: int, examples_done: int) -> Any:
        return self.source.examples.row.saved(self._number(epoch, examples_done))

    def go_on(self, epoch: int, examples_done: int, saved: Any) -> None:
        self.source.examples.row.note_saved(self._number(epoch, examples_done), saved)

    def _number(self, epoch: int, examples_done: int) -> int:
        """The number of the next example in the row."""
        return epoch * self.num_examples + min(examples_done, self.num_examples)

    def _read(self, batches: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, Any]]:
        examples = self.source.examples
        for indices in batches:
            with examples.lock:
                arrays = self.source.read(indices)
                examples.row.note()
            yield indices, arrays


def split_of(given: Any, where: str, num_classes: int | None, own_task: bool) -> Found:
    """A split of an iterable of (x, y); Args as `random_access.split_of`.

    Raises:
        ValueError: nobody says how many examples an epoch has; or see there.
    """
    sized = given if isinstance(given, Sized) else Sized(given, _length(given, where))
    examples = InTurn(Repeated(sized.iterable, where), sized.num_examples)
    split, specs, num_classes = random_access.split_of(examples, where, num_classes, own_task)
    label = specs[1]
    if not own_task and getattr(label, "shape", None) != ():
        raise ValueError(
            f"{where}: y is {label}, but must be one integer: give examples, not batches "
            "(batch_size=None, or no Batch operation)."
        )
    return Stateful(split.source, specs, split.num_examples), specs, num_classes


def check_apart(name: str, train: Any, test: Any = None) -> None:
    """Raises ValueError where two splits would move the same state."""
    one, other = (getattr(split, "iterable", split) for split in (train, test))
    if one is other and methods(one):
        raise ValueError(
            f"{name}: train and test are the same {type(one).__name__}, whose state each would "
            "move from under the other; make two."
        )


def _length(iterable: Any, where: str) -> int:
    try:
        return len(iterable)
    except TypeError:  # torchdata's loaders have the method, and raise it of some data
        raise ValueError(
            f"{where} ({type(iterable).__name__}) does not say how many examples an epoch has: "
            "give it a `__len__`; or its module, beside the function, NUM_EXAMPLES = TRAIN, TEST."
        ) from None
