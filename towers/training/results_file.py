"""results.csv, which grows by a row with each epoch."""

from collections.abc import Callable, Sequence
from pathlib import Path

from towers.checkpointing import run_dir
from towers.checkpointing.run_dir import Result
from towers.checkpointing.train_state import TrainState
from towers.training.listener import Listener


class ResultsFile(Listener):
    """Writes results.csv; where that fails, warns, and the run goes on."""

    def __init__(
        self,
        directory: Path,
        train_state: TrainState,
        columns: Sequence[str],
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            directory: of the run.
            train_state: where the run stands.
            columns: the names of its results' values.
            warn: called with one line.
        """
        self._path = directory / run_dir.RESULTS
        self._train_state, self._columns, self._warn = train_state, columns, warn

    def begin(self) -> None:
        """Drops the rows after the checkpoint: their epochs are computed again."""
        rows = [Result.of(row, self._columns) for row in self._train_state.results]
        self._write(lambda: run_dir.write_results(self._path, rows))

    def end_epoch(self, result: Result, logs: dict[str, float]) -> None:
        """Adds the epoch's row."""
        self._write(lambda: run_dir.append_result(self._path, result))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._warn(f"{self._path} cannot be written ({error.strerror}); training goes on.")
