"""Declares each field of `TrainConfig` in one place: default, help, check, and role on resuming.

seed: int = count(0, "Seed of the parameters, the order ...", at_least=0)
"""

import dataclasses
import enum
import os
import re
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from towers.machine import places


class Role(enum.Flag):
    """Lists the properties that a field has whatever its value is."""

    NONE = 0
    FREE = enum.auto()  # changes no bit of a good step, so it may change when a run continues
    LIMIT = enum.auto()  # ends the run; it may change to a point that the run has not reached
    LARGER = enum.auto()  # may become larger when a run continues
    ONCE = enum.auto()  # applies to one start; when the run continues, the default applies again
    BEGINNING = enum.auto()  # describes the machine or a run's start; trained models ignore it
    LOCAL = enum.auto()  # may differ between workers, or only the chief's value counts
    OPTIMIZER = enum.auto()  # is an argument of the optimizer


class Holds(enum.Enum):
    """Says what a text stands for."""

    WORDS = enum.auto()  # names or numbers that select something; nothing is imported
    PATH = enum.auto()  # a path or URL, which may hold a colon; nothing is imported
    CODE = enum.auto()  # a built-in name, or package.module:function, which is imported


@dataclasses.dataclass(frozen=True)
class Declared:
    """Holds a field's declaration."""

    kind: str  # "text", "count", "number", "switch" or "choice"
    help: str  # names other fields in backquotes; {FREE} stands for all FREE fields
    roles: Role
    check: Callable[[str, object], object]  # (name, value) -> the value to store, or ValueError
    words: tuple[str, ...] = ()  # all values of a choice; else the word that is allowed as well
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)  # a choice -> its error
    holds: Holds = Holds.WORDS


def declared(field: dataclasses.Field) -> Declared:
    """Returns the declaration of a dataclass' field."""
    return field.metadata["declared"]  # type: ignore[no-any-return]


def help_of(config: type, field: dataclasses.Field) -> str:
    """Returns a field's help, in which a role such as {FREE} is replaced by its fields."""

    def listed(role: re.Match) -> str:
        return ", ".join(f"`{name}`" for name in names(config, Role[role[1]]))

    return re.sub(r"\{([A-Z]+)\}", listed, declared(field).help)


def names(config: type, roles: Role) -> tuple[str, ...]:
    """Returns the names of fields that have any of these roles, in the declared order."""
    return tuple(f.name for f in dataclasses.fields(config) if declared(f).roles & roles)


def code_names(config: type) -> tuple[str, ...]:
    """Returns the names of the fields that may name code, in the declared order."""
    return tuple(f.name for f in dataclasses.fields(config) if declared(f).holds is Holds.CODE)


def text(
    default: str | None,
    help: str,
    roles: Role = Role.NONE,
    *,
    holds: Holds = Holds.WORDS,
    is_path: bool = False,
    check: Callable[[str, str], object] = lambda name, value: None,
) -> Any:
    """Declares a field for text that is not empty; `check(name, text)` may raise ValueError."""

    def checked_text(name: str, value: object) -> str:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or "\0" in value:
            raise value_error(name, value, "text without a zero character")
        if value == "":
            raise ValueError(f"`{name}` is empty; name one, or leave it out.")
        check(name, value)
        if is_path:
            return places.as_path(value)
        return value

    says = Declared("text", help, roles, checked_text, holds=holds)
    return dataclasses.field(default=default, metadata={"declared": says})


def path(default: str | None, help: str, roles: Role = Role.NONE) -> Any:
    """Declares a field for a path or a URL."""
    return text(default, help, roles, holds=Holds.PATH, is_path=True)


def code(default: str | None, help: str, *, is_path: bool = False) -> Any:
    """Declares a field that may name code. In config.json, such a name needs `trust_run_dir`.

    is_path: whether the text may also be the path of a file without code.
    """
    return text(default, help, holds=Holds.CODE, is_path=is_path)


def count(
    default: int | None,
    help: str,
    roles: Role = Role.NONE,
    *,
    at_least: int = 1,
    at_most: int = 2**31 - 1,
    word: str | None = None,
) -> Any:
    """Declares a field for a whole number from `at_least` to `at_most`, or for a `word`."""
    return _field(
        "count",
        default,
        help,
        roles,
        f"a whole number from {at_least} to {at_most}",
        lambda value: type(value) is int and at_least <= value <= at_most,
        word,
    )


def number(
    default: float | str | None,
    help: str,
    roles: Role = Role.NONE,
    *,
    at_most: float = sys.float_info.max,
    word: str | None = None,
) -> Any:
    """Declares a field for a number above 0; a field with a `word` may be the word or 0, too."""
    limit = "finite" if at_most == sys.float_info.max else f"at most {at_most}"
    return _field(
        "number",
        default,
        help,
        roles,
        f"a number above 0 and {limit}",
        lambda v: type(v) in (int, float) and (0 < v <= at_most or word is not None and v == 0),
        word,
    )


def fraction(default: float | None, help: str, roles: Role = Role.NONE) -> Any:
    """Declares a field for a number from 0 to below 1."""
    return _field(
        "number",
        default,
        help,
        roles,
        "a number from 0 to below 1",
        lambda value: type(value) in (int, float) and 0 <= value < 1,
    )


def choice(
    default: str | None,
    choices: Sequence[str],
    help: str,
    roles: Role = Role.NONE,
    *,
    refused: Mapping[str, str] | None = None,
) -> Any:
    """Declares a field for one of the words in `choices`.

    refused: for each word that users try although it is no choice, the error that explains why.
    """

    def check(name: str, value: object) -> str:
        if isinstance(value, str):
            if value in choices:
                return value
            if value in errors:
                raise ValueError(errors[value])
        raise value_error(name, value, f"one of {', '.join(choices)}")

    errors = refused or {}
    says = Declared("choice", help, roles, check, tuple(choices), errors)
    return dataclasses.field(default=default, metadata={"declared": says})


def switch(
    default: bool | str | None, help: str, roles: Role = Role.NONE, *, word: str | None = None
) -> Any:
    """Declares a field that is True, False or, if given, `word`."""
    return _field(
        "switch", default, help, roles, "True or False", lambda value: type(value) is bool, word
    )


def value_error(name: str, value: object, wanted: str) -> ValueError:
    """Returns the error for a field whose value must be `wanted`."""
    return ValueError(f"{name} ({short_repr(value)}) must be {wanted}.")


def short_repr(value: object) -> str:
    """Returns the repr of a value; a long one is shortened to its beginning and end."""
    short = reprlib.Repr()  # Python 3.12 takes the limits as arguments
    short.maxstring = short.maxother = 100
    text = short.repr(value)
    if len(text) > 200:
        return f"{text[:150]}...{text[-40:]}"
    return text


def _field(
    kind: str,
    default: object,
    help: str,
    roles: Role,
    wanted: str,
    is_right: Callable[[Any], bool],
    word: str | None = None,
) -> Any:
    """Declares a field for values for which `is_right` returns True, and for `word`."""

    def check(name: str, value: object) -> object:
        if not (isinstance(value, str) and value == word or is_right(value)):
            raise value_error(name, value, wanted)
        return value

    known: tuple[str, ...] = ()
    if word is not None:
        known, wanted = (word,), f"{wanted}, or {word}"
    says = Declared(kind, help, roles, check, known)
    return dataclasses.field(default=default, metadata={"declared": says})
