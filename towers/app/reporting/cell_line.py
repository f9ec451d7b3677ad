"""A line in the output of a notebook's cell that moves: each text takes the place of the last."""

from typing import Any


class CellLine:
    """The line; it is there from its first text on, until another line takes its place."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Shows a text in place of the one before; no frontend needs a widget for it."""
        from IPython.display import display

        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def end(self, text: str) -> bool:
        """Leaves a text where the line was; False where there was none."""
        if self._handle is None:
            return False
        self.show(text)
        self._handle = None
        return True


def cell_line(stream: Any) -> CellLine | None:
    """The line of the cell that a stream belongs to; None of any other stream."""
    return CellLine() if type(stream).__module__ == "ipykernel.iostream" else None
