"""The names that a step writes into its graph, and that the phases of its profile are read from.

    split, parameters, weights, tower_0 ... tower_7, sum, update      name scopes, the outermost
    update_program, sum_and_update_program                            compiled functions
"""

import re

from towers.machine.tensorflow_internals import TRUE_BRANCH, function_pattern

SPLIT, PARAMETERS, WEIGHTS, SUM, UPDATE = "split", "parameters", "weights", "sum", "update"
UPDATE_PROGRAM = "update_program"
SUM_AND_UPDATE_PROGRAM = "sum_and_update_program"

# Perhaps made unique: "tower_3/", "update_1/"; the update may stand behind the condition that
# everything is finite.
_SCOPE = re.compile(
    rf"(?:{TRUE_BRANCH})?"
    rf"(?P<scope>{SPLIT}|{PARAMETERS}|{WEIGHTS}|{SUM}|{UPDATE}|tower_(?P<tower>\d+))(_\d+)*/"
)
_PROGRAM = function_pattern([SUM_AND_UPDATE_PROGRAM, UPDATE_PROGRAM])


def tower(index: int) -> str:
    """The name of a tower's scope."""
    return f"tower_{index}"


def outermost(name: str) -> str | None:
    """The outermost scope of an operation "scope/.../node", None for one outside of all."""
    found = _SCOPE.match(name)
    return found["scope"] if found else None


def tower_index(name: str) -> int | None:
    """The tower that an operation "tower_3/.../node" is part of."""
    found = _SCOPE.match(name)
    return int(found["tower"]) if found and found["tower"] else None


def is_addition(name: str) -> bool:
    """Whether an operation in the update's scope is an addition of the sum that is not compiled."""
    return outermost(name) == UPDATE and f"/{SUM}/" in name


def program(text: str) -> str | None:
    """The compiled function that a kernel is part of, where the text names one."""
    found = _PROGRAM.search(text)
    return found[1] if found else None
