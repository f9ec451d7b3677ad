"""Formats numbers and their nouns for messages, and finds the name that a user may mean."""

import difflib
from collections.abc import Sequence


def plural(noun: str, count: int) -> str:
    """Returns "tower" for a count of 1, "towers" for any other count."""
    return noun if count == 1 else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Returns a text such as "1 tower" or "1,500 towers"."""
    return f"{count:,} {plural(noun, count)}"


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns " Did you mean 'adam'?" for the name that is most like `name`, or ""."""
    lower = {each.lower(): each for each in names}
    matches = difflib.get_close_matches(name.lower(), lower, n=1)
    return f" Did you mean {lower[matches[0]]!r}?" if matches else ""
