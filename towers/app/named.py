"""Imports what `package.module:function` names, and explains unknown names."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from towers.machine.user_lines import line_of_error
from towers.machine.words import nearest


def import_function(spec: str, argument: str) -> Callable[..., Any]:
    """Imports what `spec`, package.module:function, names; errors name the `argument` it is for."""
    module_name, _, function_name = spec.partition(":")
    module = import_module(spec, argument)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if callable(value)]
        raise ValueError(
            f"{argument} ({spec!r}): module {module_name} "
            f"({getattr(module, '__file__', None) or 'built in'}) has no function "
            f"{function_name!r}.{nearest(function_name, functions)}"
        )
    return function  # type: ignore[no-any-return]


def import_module(spec: str, argument: str) -> ModuleType:
    """Imports the module of `package.module:function` from sys.path or the current directory."""
    module_name, _, function_name = spec.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), function_name]):
        raise ValueError(f"{argument} ({spec!r}) must have the form package.module:function.")
    # `python train.py` puts the script's directory on sys.path, not the current one. The current
    # one is added last, and stays, because the function may import from it when it is called.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ValueError(
            f"{argument} ({spec!r}): cannot import {module_name}: {one_line(error)}. It is looked "
            f"for on sys.path and in the current directory ({os.getcwd()})."
        ) from error


def unknown_name(name: object, argument: str, names: Sequence[str]) -> ValueError:
    """Returns the error for an unknown name; it lists the built-in `names` and the nearest one."""
    return ValueError(
        f"{argument} ({name!r}) must be one of {', '.join(names)}, or package.module:function."
        f"{nearest(str(name), names)}"
    )


@contextmanager
def reading(path: object, remedy: str, kind: str = "") -> Iterator[None]:
    """Turns an error in the context into a ValueError: `path` cannot be read, why, the remedy.

    kind: the end of "cannot be read", such as " as an IDX file".
    """
    try:
        yield
    except Exception as error:  # libraries raise many types of errors for a damaged file
        why = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"{path} cannot be read{kind}: {why}. {remedy}") from None


def one_line(error: BaseException) -> str:
    """Returns an exception's type, message and line in user code, without a final full stop."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")
    line = line_of_error(error)
    return f"{text} ({line})" if line else text
