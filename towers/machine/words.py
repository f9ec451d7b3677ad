"""Words for numbers, as all that speaks to a person needs them."""


def plural(noun: str, count: int) -> str:
    """"tower" of one, "towers" of any other count."""
    return noun if count == 1 else f"{noun}s"
