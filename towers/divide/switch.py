"""TOWERS_DIVIDE=1 in the environment divides the traced step of a whole batch among towers."""

import os

VARIABLE = "TOWERS_DIVIDE"


def is_switched_on() -> bool:
    """Returns whether steps are divided, which TOWERS_DIVIDE=1 in the environment requests."""
    return os.environ.get(VARIABLE) == "1"
