"""Formats numbers and their nouns for messages."""


def plural(noun: str, count: int) -> str:
    """Returns "tower" for a count of 1, "towers" for any other count."""
    return noun if count == 1 else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Returns a text such as "1 tower" or "1,500 towers"."""
    return f"{count:,} {plural(noun, count)}"
