"""TOWERS_DIVIDE=1 in the environment divides the traced step of a whole batch among towers."""

import os

VARIABLE = "TOWERS_DIVIDE"


def is_switched_on() -> bool:
    """Returns whether steps are divided, which TOWERS_DIVIDE=1 in the environment requests."""
    return os.environ.get(VARIABLE) == "1"


def check_divisible(**options: bool) -> None:
    """Raises ValueError for options that divided steps lack; each says whether it is given."""
    given = [option for option, is_given in options.items() if is_given]
    if given:
        raise ValueError(
            f"{VARIABLE}=1 cannot be combined with {', '.join(given)} yet. Leave them out, or "
            f"unset {VARIABLE}."
        )
