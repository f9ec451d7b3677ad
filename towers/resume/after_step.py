"""Decides what follows a step, for train.py's loop and for the callback of `fit` with a Resume.

update --> callbacks --> agree --> save if due --> obey a signal --> the next batch
"""

from dataclasses import dataclass

import keras

from towers.machine.signals import Pending
from towers.resume.checkpointer import Checkpointer
from towers.resume.train_state import TrainState
from towers.workers.workers import Workers


@dataclass
class AfterStep:
    """Lets all workers agree after a step; saves, stops and obeys signals between two steps.

    All of this comes before the next batch is drawn, and so does validation. A checkpoint then
    holds the variables, the random state and the position in the data of one moment. The data may
    draw from the random state, so a checkpoint after the draw would make a resumed run skip a batch
    or draw another one.
    """

    model: keras.Model  # its `stop_training` becomes true in all workers if it is in one
    state: TrainState  # the point that the training has reached; the caller moves it before a call
    checkpointer: Checkpointer
    pending: Pending  # holds a signal until the end of a step
    workers: Workers
    # Whether the epoch under way ends without some of its steps. Its last checkpoint then stays the
    # newest, so that a later start does these steps before it validates.
    is_cut: bool = False

    def end_step(self, before: int, *, saves: bool = True) -> None:
        """Ends one or more updates, of which `before` were done when the previous call ended.

        saves: False if the caller saves soon, at the end of the epoch. A signal saves in any case.
        """
        signal = self._agree()
        self.state.stopped = self.model.stop_training
        # A later start continues after this step, unless the stop was the callback's last word.
        is_due = self.state.stopped or self.checkpointer.is_due(self.state.step, before)
        if signal or saves and is_due:
            self.checkpointer.save(self.state, is_last=signal > 0)
        self._obey(signal)

    def end_epoch(self) -> None:
        """Saves a complete epoch, after its validation and its callbacks."""
        signal = self._agree()
        self.state.stopped = self.model.stop_training
        self.state.take_history(self.model.history)
        self.save()
        self._obey(signal)

    def save(self, is_last: bool = False) -> None:
        """Saves the position, unless the epoch is cut and has been saved for the last time."""
        if not self.is_cut:
            self.checkpointer.save(self.state, is_last)

    def obey(self) -> None:
        """Obeys a signal between batches that train nothing, as in a validation."""
        self._obey(self._agree())

    def _agree(self) -> int:
        """Returns the highest number of a signal that a worker has received; 0 means none."""
        signal, stop = self.workers.all_reduce_max(
            self.pending.number or 0, int(self.model.stop_training)
        )
        self.model.stop_training = bool(stop)
        return signal

    def _obey(self, signal: int) -> None:
        """Raises StopRequested in all workers if there is a signal."""
        if signal:
            self.workers.barrier()  # then the others know of the signal, and this one may end
            self.pending.obey(signal)
