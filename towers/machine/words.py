"""Words for numbers, as all that speaks to a person needs them."""


def plural(noun: str, count: int) -> str:
    """"tower" of one, "towers" of any other count."""
    return noun if count == 1 else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """"1 tower", "1,500 towers"."""
    return f"{count:,} {plural(noun, count)}"
