"""The data of a `fit` that goes on: an iterable whose iterator, or itself, has a state.

    batch 0 | state 1 | batch 1 | state 2 | batch 2 ...     read ahead of the steps
                           ^ saved after step 1: what is read ahead is read again

Such are Grain's datasets and loaders, torchdata's StatefulDataLoader, and whatever has
`get_state()` and `set_state(value)`, or `state_dict()` and `load_state_dict(value)`.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras

from towers.checkpointing.plain_state import decoded, encoded
from towers.step.structures import as_tensor, batch_specs, map_tensors

_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def methods(value: Any) -> tuple[str, str] | None:
    """The names of the two methods by which it gives and takes its state; None: it has none."""
    return next((names for names in _METHODS if all(hasattr(value, n) for n in names)), None)


class Stateful:
    """An endless row of passes over an iterable, which goes on where its state says."""

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
        self._source, self._done = source, done
        self._is_anew = saved is None  # else its pass may have no batch left
        self._iterator = self._begun(saved)
        self._read = done()
        self._states = {self._read: saved if saved is not None else self._state()}
        self._batches = self._all()
        first = next(self._batches)
        self.spec = batch_specs(map_tensors(as_tensor, first))
        self.identity = {"data": f"{type(source).__name__} {self.spec}"}
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
        while True:
            before = self._read
            for batch in self._iterator:
                self._read += 1
                done = self._done()
                self._states = {step: s for step, s in self._states.items() if step >= done}
                self._states[self._read] = self._state()
                yield keras.tree.lists_to_tuples(batch)
            if self._read == before and self._is_anew:
                raise ValueError(f"x ({type(self._source).__name__}) gives no batch.")
            self._iterator, self._is_anew = iter(self._source), True

    def _begun(self, saved: Any) -> Iterator[Any]:
        """An iterator that goes on where the state says."""
        of_source = methods(self._source)
        if of_source and saved is not None:
            getattr(self._source, of_source[1])(decoded(saved))
        iterator = iter(self._source)
        of_iterator = methods(iterator)
        if of_iterator and not of_source and saved is not None:
            getattr(iterator, of_iterator[1])(decoded(saved))
        return iterator

    def _state(self) -> Any:
        owner = self._source if methods(self._source) else self._iterator
        names = methods(owner)
        assert names is not None
        try:
            return encoded(getattr(owner, names[0])())
        except ValueError as error:
            raise ValueError(
                f"x ({type(self._source).__name__}): its {names[0]}() cannot be saved: {error}."
            ) from None
