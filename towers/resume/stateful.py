"""The data of a `fit` that goes on: an iterable whose iterator, or itself, has a state.

    batch 0 | state 1 | batch 1 | state 2 | batch 2 ...     read ahead of the steps
                           ^ saved after step 1: what is read ahead is read again
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras

from towers.resume.plain_state import decoded, encoded
from towers.resume.repeated import Repeated
from towers.step.structures import batch_specs, map_tensors
from towers.step.tensor_rows import as_tensor


class Stateful:
    """An endless row of passes over an iterable, which goes on where its state says."""

    skipped = 0
    num_batches: int | None = None
    most_steps = sys.maxsize

    def __init__(
        self, source: Any, num_passed: int, done: Callable[[], int], saved: Any = None
    ) -> None:
        """
        Args:
            source: the iterable, of batches as `fit` takes them.
            num_passed: the steps of the epoch that goes on which are done: `fit` drops as many.
            done: returns the steps made so far.
            saved: of `state`, where it goes on.

        Raises:
            ValueError: its state cannot be saved, or it gives no batch.
        """
        self._row, self._done = Repeated(source, "x", decoded(saved)), done
        self._name = type(source).__name__
        self._read = done()
        self._states = {self._read: saved if saved is not None else self._state()}
        self._batches = self._all()
        first = next(self._batches)
        self.spec = batch_specs(map_tensors(as_tensor, first))
        self.identity = {"data": f"{self._name} {self.spec}"}
        self.x = self._with_passed(first, num_passed)

    def begin_epoch(self, epoch: int) -> None:
        """Does nothing: the row goes on."""

    def state(self) -> Any:
        """The state after the steps made so far, as JSON values."""
        return self._states[self._done()]

    def _with_passed(self, first: Any, num_passed: int) -> Iterator[Any]:
        for _ in range(num_passed):
            yield first
        yield first
        yield from self._batches

    def _all(self) -> Iterator[Any]:
        """Every batch, once its state is known; read by whoever reads ahead."""
        for batch in self._row:
            self._read += 1
            done = self._done()
            self._states = {step: s for step, s in self._states.items() if step >= done}
            self._states[self._read] = self._state()
            yield keras.tree.lists_to_tuples(batch)

    def _state(self) -> Any:
        try:
            return encoded(self._row.state())
        except ValueError as error:
            raise ValueError(
                f"x ({self._name}): its {self._row.state_method}() cannot be saved: {error}."
            ) from None
