"""Follows Keras through the data of a fit, and leads it to the same place in a resumed fit.

    first fit     epoch 0: iterator 1  | epoch 1: iterator 2  | epoch 2: iterator 3, 2 steps
    resumed fit   epoch 0: not read    | epoch 1: not read    | epoch 2: iterator 3, 2 steps read
                  the same iterators and calls of on_epoch_end, by Keras' own loop    then trains

Keras decides itself when an iterator begins and when it ends. So this module repeats no rule of
Keras: in a resumed fit, Keras' loop runs from the first epoch, and a step that is done only reads.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import tensorflow as tf

from towers.resume.random_state import random_state, set_random_state
from towers.resume.stateful import Json, decoded, encoded


@dataclass
class Position:
    """Says how far Keras has read the data of a fit, in values of JSON."""

    first: int = 0  # the epoch with which the data began
    epochs: list[int] = field(default_factory=list)  # the number of steps of each complete epoch
    num_passes: int = 0  # how many iterators have been read
    pass_step: int = 0  # how many batches of the last of them are done
    at_start: dict[str, Json] = field(default_factory=dict)  # the random state as the fit began
    at_epoch: dict[str, Json] = field(default_factory=dict)  # the same, as the epoch began
    at_pass: dict[str, Json] = field(default_factory=dict)  # the same, as the last iterator began
    variables: list[Json] = field(default_factory=list)  # those of the data, as that iterator began
    # For each call of the data's on_epoch_begin and on_epoch_end: the random states that it draws
    # from and that something else has changed since the call before.
    calls: list[dict[str, Json]] = field(default_factory=list)


class Replay:
    """Holds the position in the data, and the position that a resumed fit has to reach."""

    keeps_random = False  # whether the data draw from `random` or `np.random`
    variables: Sequence[tf.Variable] = ()  # reading the data changes them

    def __init__(self, first: int, then: Mapping[str, Any] | None = None) -> None:
        """
        first: the epoch with which the data begin, if the fit does not resume.
        then: the result of `to_json` to resume from.
        """
        self.then = None if then is None else Position(**then)
        if self.then is None:
            self.now = Position(first, at_start=random_state())
        else:
            self.now = Position(self.then.first, at_start=self.then.at_start)
            set_random_state(self.then.at_start)  # Keras reads a generator before the fit begins
        self.is_over = self.then is None  # whether the position is reached
        self.is_before_epoch = not self.is_over  # whether the epoch of the position has not begun
        self.is_closed = False  # whether the fit has ended
        self._reached = threading.Event()
        if self.is_over:
            self._reached.set()
        self._iterator: Callable[[], object] = lambda: None
        # The random states after the last call that drew from them.
        self._left: dict[str, Json] = {}

    def to_json(self) -> dict[str, Json]:
        """Returns a copy of the position as JSON values."""
        return asdict(self.now)

    def jump(self, is_within: bool) -> None:
        """Goes to the position at once, because the iterators before it do not matter.

        is_within: whether the position lies within an iterator, so that Keras begins it again.
        """
        if self.then is not None:
            self.now = Position(**asdict(self.then))
            self.now.num_passes -= is_within

    def begin_anew(self, epoch: int) -> None:
        """Forgets the position, so that the data begin with this epoch."""
        self.then, self.now = None, Position(epoch, at_start=random_state())
        self.is_over, self.is_before_epoch = True, False
        self._reached.set()

    def reach(self) -> None:
        """Ends the replay: from now on, all that Keras reads is new."""
        if not self.is_over:
            assert self.then is not None
            self.is_over = True
            self.now.pass_step = self.then.pass_step
            self._reached.set()

    def wait(self) -> None:
        """Makes a thread that reads ahead wait until the position is reached, or the fit ends."""
        while not self._reached.wait(0.5) and not self.is_closed:
            pass

    def begin_epoch(self, is_within: bool) -> None:
        """Begins an epoch that is not done, with the random state of its first steps.

        is_within: whether the position lies within this epoch, so that Keras begins it again.
        """
        self.is_before_epoch = False
        if is_within and self.then is not None:
            set_random_state(self.then.at_epoch)
        if self.keeps_random:
            self.now.at_epoch = random_state()

    def begin_pass(self, iterator: tf.data.Iterator) -> bool:
        """Counts an iterator that Keras reads for the first time. Returns whether it did."""
        if self._iterator() is iterator:
            return False
        self._iterator = weakref.ref(iterator)  # Keras has to be the last one to hold it
        now, then = self.now, self.then
        now.num_passes, now.pass_step = now.num_passes + 1, 0
        if not self.is_over and then is not None and now.num_passes == then.num_passes:
            set_random_state(then.at_pass)
            for variable, value in zip(self.variables, then.variables, strict=True):
                variable.assign(decoded(value))
        if self.keeps_random:
            now.at_pass = random_state()
        now.variables = [encoded(variable.numpy()) for variable in self.variables]
        return True

    @property
    def is_before_pass(self) -> bool:
        """Returns whether the iterator that the position lies in has not begun."""
        return not self.is_over and (
            self.then is not None and self.now.num_passes < self.then.num_passes
        )

    @property
    def num_done(self) -> int:
        """Returns the number of batches of the current iterator that are not needed again."""
        then = self.then
        if self.is_over or then is None or self.now.num_passes > then.num_passes:
            return 0
        return then.pass_step

    def call(self, method: Callable[[], object]) -> None:
        """Calls a method of the data between epochs, with the random state of the first fit."""
        then, index = self.then, len(self.now.calls)
        is_repeated = not self.is_over and then is not None and index < len(then.calls)
        changed = then.calls[index] if is_repeated and then is not None else {}
        if is_repeated:
            set_random_state({**self._left, **changed})
        before = random_state()
        method()
        after = random_state()
        drawn = {name: state for name, state in before.items() if after[name] != state}
        if not is_repeated:
            changed = {name: v for name, v in drawn.items() if self._left.get(name) != v}
        self._left |= {name: after[name] for name in drawn}
        self.now.calls.append(changed)
