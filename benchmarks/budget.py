"""The time that is left, and the share of it that a case may take."""

import time


class Budget:
    """Seconds, counted from now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds; negative once they are over."""
        return self._end - time.monotonic()


def case_limit(left: float, most: float, least: float) -> float | None:
    """The seconds that a case may take; None if too few are left to begin it.

    Args:
        left: for all that is still to come.
        most: that any case may take.
        least: in which no case can end.
    """
    return min(left, most) if left >= min(least, most) else None
