"""Gives the class TowerStep: the divided one with TOWERS_DIVIDE=1 in the environment."""

from typing import Any

from towers.divide import tower_step as divided
from towers.divide.switch import is_switched_on
from towers.step import tower_step as today


def __getattr__(name: str) -> Any:
    # At each access, because a notebook or a test may set the variable later.
    if name != "TowerStep":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return divided.TowerStep if is_switched_on() else today.TowerStep
