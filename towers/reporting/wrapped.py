"""A line that is longer than the terminal is wide, broken between words."""

import re

from rich.cells import cell_len
from rich.text import Text


def wrapped(text: Text, width: int, indent: int) -> Text:
    """The text in lines of at most `width` columns; those after the first are indented.

    A longer word, such as a path, stays whole, for the terminal to break: copied, it is whole.
    For the same reason a text with `no_wrap` stays as it is, such as one with a command.
    """
    if text.no_wrap or text.cell_len <= width:
        return text
    breaks, column = [], 0
    for word in re.finditer(r"\s*(\S+)", text.plain):
        length = cell_len(word.group())
        if column > 0 and column + length > width:
            breaks.append(word.start(1))
            column, length = indent, cell_len(word.group(1))
        column += length
    first, *rest = text.divide(breaks)
    for line in (first, *rest):
        line.rstrip()
    return Text("\n" + " " * indent).join([first, *rest])
