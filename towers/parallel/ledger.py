"""Ledger: the callback that writes the digests of a parallel model's fit."""

from collections.abc import Mapping

import keras

from towers.machine import places
from towers.machine.user_lines import warn_user
from towers.parallel.model_state import STATE, towers_of
from towers.resume.ledger import LedgerFile
from towers.resume.resume import only_parallel
from towers.resume.train_state import Logs


class Ledger(keras.callbacks.Callback):
    """Writes digests of parameters, batch and seeds every few steps, to compare two fits.

    ```python
    parallel.fit(x, y, epochs=90, callbacks=[towers.Ledger("ledger.csv"), towers.Resume("backup")])
    ```

    The file has the columns epoch, step, parameters, batch and seeds. Equal fits write equal
    files, on any number of devices. A fit begins a new file, unless towers.Resume lets it continue:
    then lines after its checkpoint are written again. With several workers, the chief writes.
    """

    def __init__(self, path: places.PathLike, every: int = 20) -> None:
        """
        Args:
            path: the file, such as "ledger.csv".
            every: the number of updates between two lines. A digest takes about 1.5 ns for each
                parameter and value of the batch.

        Raises:
            ValueError: an argument is wrong.
        """
        super().__init__()
        if type(every) is not int or every < 1:
            raise ValueError(f"every ({every!r}) must be an integer of at least 1.")
        try:
            self._path = places.absolute(path)
        except TypeError:
            raise ValueError(f"path ({path!r}) must be a path.") from None
        self._every = every
        self._place = {"epoch": 0, "step": 0, "epoch_step": 0}
        self._file: LedgerFile | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raises ValueError if the model is not parallel."""
        if STATE not in vars(self.model):
            raise only_parallel(self)
        self._place, self._file = {"epoch": 0, "step": 0, "epoch_step": 0}, None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._place.update(epoch=epoch, epoch_step=0)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Writes a line if one is due. Keras calls it after several steps, if told so."""
        place, before = self._place, self._place["step"]
        place["step"] += batch + 1 - place["epoch_step"]
        place["epoch_step"] = batch + 1
        towers = towers_of(self.model)
        if not towers.workers.is_chief:
            return
        if self._file is None:
            self._file = LedgerFile(self._path, self.model, self._every, warn_user)
        self._file.add(
            place["epoch"] + 1,
            place["step"],
            before,
            lambda: None if towers.own_rows else towers.newest["train"].read(),
        )

    def get_state(self) -> dict[str, int]:
        """Returns the position as JSON values, for towers.Resume."""
        return dict(self._place)

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continues at a position that `get_state` returned."""
        self._place = dict(state)
