"""When a run's state is saved: at its start, between two steps, after each epoch, at its end."""

import time
from collections.abc import Callable

from towers.checkpointing.position import Position
from towers.checkpointing.run_dir import Result
from towers.training.listener import Listener
from towers.training.saver import Saver

SECONDS_BETWEEN_SAVES = 600.0


class Autosave(Listener):
    """Puts a resumed run's state in place, and saves it from then on.

    The last of the listeners: a checkpoint holds what the others have done.
    """

    def __init__(
        self,
        saver: Saver,
        position: Position,
        steps_an_epoch: int,
        every: int | None,
        tell_stopped: Callable[[int, bool], None],
    ) -> None:
        """
        Args:
            saver: writes and reads checkpoints.
            position: where the run stands.
            steps_an_epoch: the last one may be a partial batch.
            every: updates from one checkpoint to the next; None: at least one every 10 minutes.
            tell_stopped: called when the run ends early, with the step of the newest checkpoint,
                and whether the run stands there.
        """
        self._saver, self._position = saver, position
        self._steps_an_epoch, self._every = steps_an_epoch, every
        self._tell_stopped = tell_stopped
        self._saved_at = time.monotonic()
        self._has_begun = False
        self._ends_in_mid_epoch = False

    def begin(self) -> None:
        """Puts the loaded state in place, or saves that of step 0.

        Raises:
            ValueError: the first checkpoint cannot be written.
        """
        self._saver.begin(self._position)
        self._saved_at = time.monotonic()
        self._has_begun = True

    def between_steps(self) -> None:
        """Saves if it is time."""
        if self._every is None:
            is_due = time.monotonic() - self._saved_at >= SECONDS_BETWEEN_SAVES
        else:
            is_due = self._position.step % self._every == 0
        if is_due:
            self._save()

    def begin_validation(self) -> None:
        """Before validation replaces the sums of the epoch, which a complete one needs no more.

        A run that ends in mid-epoch is saved here, for the last time: with a larger --max_steps it
        then goes on as if it had never ended.
        """
        if self._position.epoch_step < self._steps_an_epoch:
            self._save()
            self._ends_in_mid_epoch = True

    def end_epoch(self, result: Result, logs: dict[str, float]) -> None:
        """Saves each epoch: the best one's state is among them."""
        self._save()

    def end(self) -> None:
        """Before callbacks hear of the end: they may put the weights of another epoch in place."""
        self._save()

    def stop(self) -> None:
        """Saves, unless an update has begun and not ended; says where the run goes on from."""
        is_consistent = self._has_begun and not self._position.in_step
        if is_consistent:
            self._save()
        is_saved = self._saver.wait() and is_consistent
        step = self._saver.newest_step()
        if step is not None:
            self._tell_stopped(step, is_saved)

    def _save(self) -> None:
        if not self._ends_in_mid_epoch:
            self._saver.save(self._position)
            self._saved_at = time.monotonic()
