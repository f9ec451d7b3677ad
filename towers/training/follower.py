"""The saver of a worker that is not the chief: it has what the chief reads, and writes no state."""

from towers.checkpointing import relay
from towers.checkpointing.position import Position
from towers.checkpointing.relay import Found
from towers.training.saver import Saver


class Follower(Saver):
    """Puts the chief's state in place; all workers have the same one after each step."""

    _finished_step: int | None = None

    def _find(self, resume: bool) -> Found | None:
        heard = relay.hear(self.workers)
        self._finished_step = heard.finished_step
        return heard.found

    def _begin_files(self, position: Position, *, is_new: bool) -> None:
        pass

    def save(self, position: Position) -> None:
        """Leaves it to the chief."""

    def wait(self) -> bool:
        """Nothing is ever being written."""
        return True

    def newest_step(self) -> None:
        """Checkpoints are the chief's."""

    def finish(self, position: Position) -> None:
        """Leaves it to the chief."""

    def finished_step(self) -> int | None:
        return self._finished_step
