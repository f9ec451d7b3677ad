"""Listeners run beside the steps: files, lines on the terminal, callbacks; all of one shape.

    begin
        begin_epoch
            begin_step  [ one update ]  end_step    between_steps
            ...
            begin_step  [ one update ]  end_step
        begin_validation
            begin_test
                begin_test_step  [ a batch of test examples ]  end_test_step
                ...
            end_test
        end_epoch
        ...
    end                                             or, wherever an exception ends the run: stop
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from towers.resume.run_dir import Result
from towers.machine import hang


class Listener:
    """Is told where a run stands; overrides the moments that matter to it.

    Where the run stands is in its `TrainState`, which the listeners that need it hold.

    phase: what it does, as who looks for a hang reads it.
    """

    phase = hang.BETWEEN

    def begin(self) -> None:
        """Called before the first epoch of this process."""

    def begin_epoch(self) -> None:
        """Called before the first step of an epoch, or of what is left of one."""

    def begin_step(self) -> None:
        """Called before an update."""

    def end_step(self) -> None:
        """Called after an update, which the train state counts."""

    def between_steps(self) -> None:
        """Called after an update that another one of its epoch follows."""

    def begin_validation(self) -> None:
        """Called after the last update of an epoch; the sums of its metrics are still there."""

    def begin_test(self) -> None:
        """Called before the first batch of test examples, if there are any."""

    def begin_test_step(self, batch: int) -> None:
        """Called before a batch of test examples is evaluated, the first of which is batch 0."""

    def end_test_step(self, batch: int, logs: dict[str, Any]) -> None:
        """Called after it; logs: the means over the batches so far, {"loss": ...}."""

    def end_test(self, logs: dict[str, float]) -> None:
        """Called after the last batch; logs: the means over all of them."""

    def end_epoch(self, result: Result, logs: dict[str, float]) -> None:
        """Called after an epoch's validation; the train state counts the epoch.

        Args:
            result: the epoch's row of results.csv.
            logs: its means, {"loss": ..., "val_loss": ...}.
        """

    def end(self) -> None:
        """Called after the last epoch."""

    def stop(self) -> None:
        """Called as an exception ends the run, which is raised again afterwards."""


class Listeners(Listener):
    """Tells each of several listeners, in their order; of the end in the reverse order.

    It is as with nested `with` blocks: who has begun last may rely on all the others until it has
    ended.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = list(listeners)

    def begin(self) -> None:
        for listener in _each(self._listeners):
            listener.begin()

    def begin_epoch(self) -> None:
        for listener in _each(self._listeners):
            listener.begin_epoch()

    def begin_step(self) -> None:
        for listener in _each(self._listeners):
            listener.begin_step()

    def end_step(self) -> None:
        for listener in _each(self._listeners):
            listener.end_step()

    def between_steps(self) -> None:
        for listener in _each(self._listeners):
            listener.between_steps()

    def begin_validation(self) -> None:
        for listener in _each(self._listeners):
            listener.begin_validation()

    def begin_test(self) -> None:
        for listener in _each(self._listeners):
            listener.begin_test()

    def begin_test_step(self, batch: int) -> None:
        for listener in _each(self._listeners):
            listener.begin_test_step(batch)

    def end_test_step(self, batch: int, logs: dict[str, Any]) -> None:
        for listener in _each(self._listeners):
            listener.end_test_step(batch, logs)

    def end_test(self, logs: dict[str, float]) -> None:
        for listener in _each(self._listeners):
            listener.end_test(logs)

    def end_epoch(self, result: Result, logs: dict[str, float]) -> None:
        for listener in _each(self._listeners):
            listener.end_epoch(result, logs)

    def end(self) -> None:
        for listener in _each(reversed(self._listeners)):
            listener.end()

    def stop(self) -> None:
        for listener in _each(reversed(self._listeners)):
            listener.stop()


def _each(listeners: Iterable[Listener]) -> Iterator[Listener]:
    """Each listener, in its phase."""
    for listener in listeners:
        hang.enter(listener.phase)
        yield listener
    hang.enter(hang.BETWEEN)
