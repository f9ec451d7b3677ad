"""Examples of an iterable that has a state, in its own order: Grain's, torchdata's, anyone's.

    state 0 | batch 0 | state 1 | batch 1 | state 2 | batch 2 ...     read ahead of the steps
                                     ^ saved after step 1, and gone on from at once

An epoch is N examples; the iterable begins anew whenever it ends.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from towers.app.datasets import random_access
from towers.app.datasets.dataset import Dataset
from towers.app.datasets.random_access import RandomAccess, from_source
from towers.resume.repeated import Repeated, methods
from towers.resume.source import Epoch, ExplainedBatches, InputOptions, Order
from towers.app.reading.examples import Source

_STATES_KEPT = 256  # batches are read at most a few ahead of the steps


class Sized(NamedTuple):
    """An iterable, and the number of its examples that are an epoch."""

    iterable: Any
    num_examples: int


class InTurn:
    """Examples by their position: the next one is at hand, or one whose state is known."""

    def __init__(self, examples: Repeated, num_examples: int) -> None:
        self._examples, self._num_examples = examples, num_examples
        self._at, self._states = 0, {0: examples.state()}

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, position: int) -> Any:
        if position != self._at:
            self._examples.go_to(self._states[position])
            self._at = position
        example = next(self._examples)
        self._at += 1
        return example

    def note(self) -> None:
        """Keeps the state at hand; of those before it, the last ones and the first."""
        self._states[self._at] = self._examples.state()
        if len(self._states) > _STATES_KEPT:
            del self._states[sorted(self._states)[1]]

    def state(self, position: int) -> Any:
        """The state before the example at a position, one of those kept."""
        return self._states[position]

    def go_on(self, position: int, state: Any) -> None:
        """Says what was saved of a position."""
        self._states[position] = state


@dataclass(frozen=True, eq=False)
class _Batches(Source):
    """Reads whole batches of an `InTurn`, one after the other, and notes the state after each."""

    lock: Any

    def read(
        self, indices: Sequence[int], begin: Callable[[int], None] | None = None
    ) -> list[np.ndarray]:
        with self.lock:
            arrays = super().read(indices, begin)
            self.examples.note()
            return arrays


@dataclass(frozen=True, eq=False)
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
        return super().opened(options)  # type: ignore[return-value]

    def batches(self, epoch: Epoch) -> ExplainedBatches:
        """The next examples of the row, whatever order is asked for."""

        def order(count: int) -> Order:
            return lambda indices: indices + epoch.number * count

        return super().batches(epoch._replace(order=order))


def state_at(source: Any, epoch: int, examples_done: int) -> Any:
    """The state to save with a checkpoint; None where the position says all.

    Args:
        source: of the training examples.
        epoch: complete epochs.
        examples_done: of the epoch under way; or more, where all of them are.
    """
    if not isinstance(source, Stateful):
        return None
    count = source.num_examples
    return source.source.examples.state(epoch * count + min(examples_done, count))


def go_on(source: Any, epoch: int, examples_done: int, state: Any) -> None:
    """Gives a source what `state_at` returned, for reading that begins there."""
    if isinstance(source, Stateful):
        count = source.num_examples
        source.source.examples.go_on(epoch * count + min(examples_done, count), state)


def from_iterable(
    given: Any, where: str, num_classes: int | None, own_task: bool = False
) -> Stateful:
    """A split of an iterable of (x, y); Args and Raises as `random_access.from_source`.

    Raises:
        ValueError: nobody says how many examples an epoch has.
    """
    sized = given if isinstance(given, Sized) else Sized(given, _length(given, where))
    examples = InTurn(Repeated(sized.iterable, where), sized.num_examples)
    split = from_source(examples, where, num_classes, own_task)
    label = split.structure[1]
    if not own_task and getattr(label, "shape", None) != ():
        raise ValueError(
            f"{where}: y is {label}, but must be one integer: give examples, not batches "
            "(batch_size=None, or no Batch operation)."
        )
    source = _Batches(**vars(split.source), lock=threading.Lock())
    return Stateful(source, split.structure, split.num_examples)


def check_apart(name: str, train: Any, test: Any) -> None:
    """Raises ValueError where two splits would move the same state."""
    one, other = (getattr(split, "iterable", split) for split in (train, test))
    if one is other and methods(one):
        raise ValueError(
            f"{name}: train and test are the same {type(one).__name__}, whose state each would "
            "move from under the other; make two."
        )


def of_classes(name: str, train: Any, test: Any, num_classes: int | None) -> Dataset:
    """A data set of iterables. Raises ValueError where they differ in shape, or are the same."""
    check_apart(name, train, test)
    return random_access.of_sources(
        name,
        from_iterable(train, f"{name} (train)", num_classes),
        from_iterable(test, f"{name} (test)", num_classes),
        num_classes,
    )


def of_any(given: Any, where: str) -> tuple[Stateful, Any]:
    """A split of any structure, and the specs of one x and one y."""
    split = from_iterable(given, where, None, own_task=True)
    return split, split.structure


def _length(iterable: Any, where: str) -> int:
    try:
        return len(iterable)
    except TypeError:  # torchdata's loaders have the method, and raise it of some data
        raise ValueError(
            f"{where} ({type(iterable).__name__}) does not say how many examples an epoch has: "
            "give it a `__len__`; or its module, beside the function, NUM_EXAMPLES = TRAIN, TEST."
        ) from None
