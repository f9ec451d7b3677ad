"""Declarations of `TrainConfig`'s fields: default, help and check in one place.

    seed: int = count(0, "Of the parameters, the order ...", at_least=0)

The command line's flags, their help, and what may change when a run goes on follow from it.
"""

import dataclasses
import enum
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from towers.machine import places

_LARGEST_COUNT = 2**63 - 1  # TensorFlow counts so far


class Role(enum.Flag):
    """The properties of a field that do not depend on its value.

    FREE: no bit of a good step depends on it: it may be another when a run goes on.
    LIMIT: where a run ends: it may be another that the run has not reached.
    LARGER: it may become larger when a run goes on.
    ONCE: asked of one start of a run; when it goes on, the default is back.
    BEGINNING: of the machine, or of how a run begins: a trained model's file needs none of it.
    LOCAL: each worker has its own, or the chief's alone counts.
    OPTIMIZER: it makes the optimizer another one.
    """

    NONE = 0
    FREE = enum.auto()
    LIMIT = enum.auto()
    LARGER = enum.auto()
    ONCE = enum.auto()
    BEGINNING = enum.auto()
    LOCAL = enum.auto()
    OPTIMIZER = enum.auto()


@dataclasses.dataclass(frozen=True)
class Declared:
    """A field's declaration.

    kind: "text", "count", "number", "switch" or "choice".
    help: what it does, its unit and its default's reason; other fields stand in backquotes, and
        {FREE} stands for all fields of that role.
    check: (name, value) -> the value to hold; raises ValueError. It sees no None that is a default.
    words: of a choice all values; else what the field may be beside a value of its kind.
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


def checked(config: Any) -> Iterator[tuple[str, Any]]:
    """Each field's name and checked value.

    Raises:
        ValueError: a value makes no sense.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None or field.default is not None:
            value = declared(field).check(field.name, value)
        yield field.name, value


def text(
    default: str | None, help: str, roles: Role = Role.NONE, *, is_path: bool = False,
    check: Callable[[str, str], None] | None = None,
) -> Any:
    """A field of text that is not empty.

    Args:
        is_path: see `places.as_path`.
        check: (name, text); raises ValueError for what the text may not be.
    """
    def checked_text(name: str, value: Any) -> str:
        value = _text(name, value)
        if check is not None:
            check(name, value)
        return places.as_path(value) if is_path else value

    return _field(default, Declared("text", help, roles, checked_text))


def spelled(
    default: str | None, help: str, roles: Role = Role.NONE, *, check: Callable[[str, Any], Any]
) -> Any:
    """A field of text whose `check` returns, of whatever arrives, the text to hold."""
    return _field(default, Declared("text", help, roles, check))


def count(
    default: int | None, help: str, roles: Role = Role.NONE, *, at_least: int = 1,
    at_most: int = _LARGEST_COUNT, word: str | None = None,
) -> Any:
    """A field of a whole number; or of `word`."""
    def check(name: str, value: Any) -> Any:
        if word is not None and value == word:
            return value
        if type(value) is not int:
            raise ValueError(f"{name} ({shown(value)}) must be a whole number.")
        if value < at_least:
            raise ValueError(f"{name} ({shown(value)}) must be at least {at_least}.")
        if value > at_most:
            raise ValueError(f"{name} ({shown(value)}) must be at most {at_most}.")
        return value

    return _field(default, Declared("count", help, roles, check, (word,) if word else ()))


def number(
    default: float | str | None, help: str, roles: Role = Role.NONE, *, example: str,
    most_seconds: int | None = None, word: str | None = None,
) -> Any:
    """A field of a number above 0; `most_seconds`: of a time; of `word`: may be that, or 0."""
    def check(name: str, value: Any) -> float | str:
        if word is not None and (value == word or value == 0 and type(value) is not bool):
            return value  # type: ignore[no-any-return]
        if isinstance(value, bool) or not isinstance(value, int | float):
            or_else = f", or {word}" if word else ""
            raise ValueError(f"{name} ({shown(value)}) must be a number{or_else}.")
        if not 0 < value <= sys.float_info.max:
            raise ValueError(
                f"{name} ({shown(value)}) must be above 0 and finite, such as {example}."
            )
        if most_seconds is not None and value > most_seconds:
            raise ValueError(f"{name} ({shown(value)}) must be at most {most_seconds} seconds.")
        return value

    return _field(default, Declared("number", help, roles, check, (word,) if word else ()))


def part(default: float | None, help: str, roles: Role = Role.NONE, *, example: float) -> Any:
    """A field of a number from 0 to below 1."""
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(
                f"{name} ({shown(value)}) must be a number from 0 to below 1, such as {example}."
            )
        return value

    return _field(default, Declared("number", help, roles, check))


def choice(default: str | None, choices: Sequence[str], help: str, roles: Role = Role.NONE) -> Any:
    """A field of one of some words."""
    def check(name: str, value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"{name} ({shown(value)}) must be one of {', '.join(choices)}.")
        return value

    return _field(default, Declared("choice", help, roles, check, tuple(choices)))


def switch(
    default: bool | str | None, help: str, roles: Role = Role.NONE, *, word: str | None = None
) -> Any:
    """A field that is True or False; or `word`."""
    def check(name: str, value: Any) -> Any:
        if type(value) is not bool and (word is None or value != word):
            or_else = f" or {word!r}" if word else ""
            raise ValueError(f"{name} ({shown(value)}) must be True or False{or_else}.")
        return value

    return _field(default, Declared("switch", help, roles, check, (word,) if word else ()))


def regular_expression(name: str, value: str) -> None:
    """Raises ValueError for a text that is none."""
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{name} ({shown(value)}) is no regular expression: {error}.") from None


def shown(value: Any) -> str:
    """A value as Python writes it; of a long one, its beginning and its end."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    text = short.repr(value)
    return text if len(text) <= 200 else f"{text[:150]}...{text[-40:]}"


def _field(default: Any, declaration: Declared) -> Any:
    return dataclasses.field(default=default, metadata={"declared": declaration})


def _text(name: str, value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ValueError(f"{name} ({shown(value)}) must be text.")
    if text == "":
        raise ValueError(f"`{name}` is empty; name one, or leave it out.")
    if "\0" in text:
        raise ValueError(f"{name} ({shown(text)}) holds a zero character; leave it out.")
    return text
