"""Reads examples in order from an iterable with a state, such as a loader of Grain or torchdata.

    state 0 | batch 0 | state 1 | batch 1 | state 2 | batch 2 ...     read ahead of the steps
                                     ^ saved after step 1; a run resumes from it

An epoch is N examples. When the iterable ends, it begins again.
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
    """Holds an iterable and the number of its examples in an epoch."""

    iterable: Any
    num_examples: int


class InTurn(Repeated):
    """Gives examples by number: the next example, or one that follows a noted state."""

    def __init__(self, sized: Sized, where: str) -> None:
        super().__init__(sized.iterable, where)
        self._num_examples = sized.num_examples
        self.lock = threading.Lock()  # an abandoned iterator may still read

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, number: int) -> Any:
        if number != self.at:
            self.go_to(number)
        return next(self)


class Stateful(RandomAccess):
    """Reads N examples per epoch from an endless sequence: number = epoch * N + index."""

    how = "in an order of their own, which the checkpoints keep"

    def opened(self, options: InputOptions) -> "Stateful":
        """Raises ValueError if `data_workers` is set, because there is one reader."""
        if options.data_workers:
            raise ValueError(
                f"data_workers ({options.data_workers}): {self.source.where} is read in its own "
                "order, by one reader. Leave data_workers out; set the workers of the Grain or "
                "torchdata loader instead."
            )
        return self

    def batches(self, epoch: Epoch) -> ExplainedBatches:
        """Returns batches of the next examples. `epoch.order` is ignored."""
        first = epoch.number * self.num_examples
        return super().batches(epoch._replace(order=lambda _: lambda indices: indices + first))

    def state(self, epoch: int, examples_done: int) -> Any:
        return self.source.examples.saved(self._number(epoch, examples_done))

    def go_on(self, epoch: int, examples_done: int, saved: Any) -> None:
        self.source.examples.note_saved(self._number(epoch, examples_done), saved)

    def _number(self, epoch: int, examples_done: int) -> int:
        """Returns the number of the next example in the endless sequence."""
        return epoch * self.num_examples + min(examples_done, self.num_examples)

    def _read(self, batches: Iterator[np.ndarray]) -> Iterator[tuple[np.ndarray, Any]]:
        examples = self.source.examples
        for indices in batches:
            with examples.lock:
                arrays = self.source.read(indices)
                examples.note()
            yield indices, arrays


def split_of(given: Any, where: str, num_classes: int | None, custom_loss: bool) -> Found:
    """Makes a split of an iterable of (x, y), or of a `Sized`; errors call it `where`.

    Raises:
        ValueError: the length of an epoch is not known, or an example does not fit the task.
    """
    if not isinstance(given, Sized):
        try:
            given = Sized(given, len(given))
        except TypeError:  # torchdata's loaders have `__len__`, but it raises for some data
            raise ValueError(
                f"{where} ({type(given).__name__}) does not say how many examples an epoch has: "
                "give it a `__len__`; or its module, beside the function, NUM_EXAMPLES = TRAIN, "
                "TEST."
            ) from None
    examples = InTurn(given, where)
    split, specs, num_classes = random_access.split_of(examples, where, num_classes, custom_loss)
    if not custom_loss and getattr(specs[1], "shape", None) != ():
        raise ValueError(
            f"{where}: y is {specs[1]}, but must be one integer: give examples, not batches "
            "(batch_size=None, or no Batch operation)."
        )
    return Stateful(split.source, specs, split.num_examples), specs, num_classes


def check_apart(name: str, train: Any, test: Any = None) -> None:
    """Raises ValueError if two splits share an iterable, and so its state."""
    one, other = (getattr(split, "iterable", split) for split in (train, test))
    if one is other and methods(one):
        raise ValueError(
            f"{name}: train and test are the same {type(one).__name__}, whose state each would "
            "move from under the other; make two."
        )
