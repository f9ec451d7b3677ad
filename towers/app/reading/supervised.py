"""A source of dicts as a source of (x, y)."""

from typing import Any


class Supervised:
    """Two features of each example of a source; it is pickled with the source."""

    def __init__(self, source: Any, x: str, y: str) -> None:
        """
        Args:
            source: `source[i]` is a dict.
            x, y: its keys.
        """
        self._source, self._x, self._y = source, x, y

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        example = self._source[index]
        return example[self._x], example[self._y]
