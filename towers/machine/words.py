"""Formats numbers, nouns and other people's names for messages, and finds the name meant."""

import difflib
import re
from collections.abc import Sequence

# Control characters, ends of lines, and characters that reverse the order of those behind them.
_ACTING = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def plural(noun: str, count: int) -> str:
    """Returns "tower" for a count of 1, "towers" for any other count."""
    if count == 1:
        return noun
    return f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Returns a text such as "1 tower" or "1,500 towers"."""
    return f"{count:,} {plural(noun, count)}"


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines of aligned columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns " Did you mean 'adam'?" for the name that is most like `name`, or ""."""
    lower = {each.lower(): each for each in names}
    matches = difflib.get_close_matches(name.lower(), lower, n=1)
    if matches:
        return f" Did you mean {lower[matches[0]]!r}?"
    return ""


def printable(text: object, kept: str = "") -> str:
    """Returns a text in which each control character, except those `kept`, is an escape code.

    A file's name may hold sequences that a terminal obeys: "a\\x1b[2J.png" clears the screen.
    """

    def escaped(found: re.Match[str]) -> str:
        if found[0] in kept:
            return found[0]
        return found[0].encode("unicode_escape").decode()

    return _ACTING.sub(escaped, str(text))
