"""Declarations of `TrainConfig`'s fields: default, help and check in one place.

    seed: int = count(0, "Seed of the parameters, the order ...", at_least=0)

The command line's flags, their help, and what may change when a run goes on follow from it.
"""

import dataclasses
import enum
import os
import re
import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from towers.machine import places


class Role(enum.Flag):
    """The properties of a field that do not depend on its value."""

    NONE = 0
    FREE = enum.auto()  # no bit of a good step depends on it: it may change when a run goes on
    LIMIT = enum.auto()  # where a run ends: it may change to what the run has not reached
    LARGER = enum.auto()  # it may become larger when a run goes on
    ONCE = enum.auto()  # it applies to one start: when the run goes on, the default is back
    BEGINNING = enum.auto()  # of the machine, or of a run's start: a trained model needs none of it
    LOCAL = enum.auto()  # each worker has its own, or the chief's alone counts
    OPTIMIZER = enum.auto()  # an argument of the optimizer


@dataclasses.dataclass(frozen=True)
class Declared:
    """A field's declaration.

    kind: "text", "count", "number", "switch" or "choice".
    help: names other fields in backquotes; {FREE} stands for all fields of that role.
    check: (name, value) -> the value to hold; raises ValueError. It sees no None that is a default.
    words: all values of a choice; else what the field may be beside a value of its kind.
    """

    kind: str
    help: str
    roles: Role
    check: Callable[[str, Any], Any]
    words: tuple[str, ...] = ()


def declared(field: dataclasses.Field) -> Declared:
    """The declaration of a dataclass' field."""
    return field.metadata["declared"]  # type: ignore[no-any-return]


def help_of(config: type, field: dataclasses.Field) -> str:
    """The help of a configuration's field, with the fields of a role in the role's place."""
    def listed(role: re.Match) -> str:
        return ", ".join(f"`{name}`" for name in names(config, Role[role[1]]))

    return re.sub(r"\{([A-Z]+)\}", listed, declared(field).help)


def names(config: type, roles: Role) -> tuple[str, ...]:
    """The fields that have any of these roles, in the order of their declaration."""
    return tuple(f.name for f in dataclasses.fields(config) if declared(f).roles & roles)


def text(
    default: str | None, help: str, roles: Role = Role.NONE, *, is_path: bool = False,
    check: Callable[[str, str], Any] = lambda name, value: None,
) -> Any:
    """A field of text that is not empty.

    Args: check: (name, text); raises ValueError for what the text may not be.
    """
    def checked_text(name: str, value: Any) -> str:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(text, str):
            raise refused(name, value, "text")
        if text == "":
            raise ValueError(f"`{name}` is empty; name one, or leave it out.")
        if "\0" in text:
            raise refused(name, value, "text without a zero character")
        check(name, text)
        return places.as_path(text) if is_path else text

    says = Declared("text", help, roles, checked_text)
    return dataclasses.field(default=default, metadata={"declared": says})


def count(
    default: int | None, help: str, roles: Role = Role.NONE, *, at_least: int = 1,
    at_most: int = 2**31 - 1,
) -> Any:
    """A field of a whole number."""
    return _field(
        "count", default, help, roles, f"a whole number from {at_least} to {at_most}",
        lambda value: type(value) is int and at_least <= value <= at_most,
    )


def number(
    default: float | str | None, help: str, roles: Role = Role.NONE, *,
    at_most: float = sys.float_info.max, word: str | None = None,
) -> Any:
    """A field of a number above 0; with a `word`, it may be that, or 0."""
    limit = "finite" if at_most == sys.float_info.max else f"at most {at_most}"
    return _field(
        "number", default, help, roles, f"a number above 0 and {limit}",
        lambda v: type(v) in (int, float) and (0 < v <= at_most or word is not None and v == 0),
        word,
    )


def part(default: float | None, help: str, roles: Role = Role.NONE) -> Any:
    """A field of a number from 0 to below 1."""
    return _field(
        "number", default, help, roles, "a number from 0 to below 1",
        lambda value: type(value) in (int, float) and 0 <= value < 1,
    )


def choice(default: str | None, choices: Sequence[str], help: str, roles: Role = Role.NONE) -> Any:
    """A field of one of some words."""
    wanted = f"one of {', '.join(choices)}"
    return _field("choice", default, help, roles, wanted, lambda value: False, *choices)


def switch(
    default: bool | str | None, help: str, roles: Role = Role.NONE, *, word: str | None = None
) -> Any:
    """A field that is True or False; or `word`."""
    return _field(
        "switch", default, help, roles, "True or False", lambda value: type(value) is bool, word
    )


def refused(name: str, value: Any, wanted: str) -> ValueError:
    """The error for a field's value that is not what it must be."""
    return ValueError(f"{name} ({shown(value)}) must be {wanted}.")


def shown(value: Any) -> str:
    """A value as Python writes it; of a long one, its beginning and its end."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    text = short.repr(value)
    return text if len(text) <= 200 else f"{text[:150]}...{text[-40:]}"


def _field(
    kind: str, default: Any, help: str, roles: Role, wanted: str,
    is_right: Callable[[Any], bool], *words: str | None,
) -> Any:
    """A field of a value that is right, or one of the `words`."""
    known = tuple(word for word in words if word is not None)
    or_word = f", or {known[0]}" if known and kind != "choice" else ""

    def check(name: str, value: Any) -> Any:
        if not (isinstance(value, str) and value in known or is_right(value)):
            raise refused(name, value, wanted + or_word)
        return value

    says = Declared(kind, help, roles, check, known)
    return dataclasses.field(default=default, metadata={"declared": says})
