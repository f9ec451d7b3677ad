"""Resolves names of models and data sets: built-in, or `package.module:function`."""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from towers.machine.user_lines import line_of_error


def import_function(spec: str, argument: str) -> Callable[..., Any]:
    """The function that `package.module:function` names.

    Args:
        spec: "package.module:function". The module is looked for on sys.path and in the current
            directory.
        argument: the name of the argument that `spec` is, such as "model", for the error.

    Raises:
        ValueError: `spec` has another form, its module cannot be imported (the cause is given),
            or the module has no such function.
    """
    module_name, _, function_name = spec.partition(":")
    module = import_module(spec, argument)
    function = getattr(module, function_name, None)
    if function is None:
        functions = [name for name, value in vars(module).items() if callable(value)]
        raise ValueError(
            f"{argument} ({spec!r}): module {module_name} ({_origin(module)}) has no function "
            f"{function_name!r}.{_nearest(function_name, functions)}"
        )
    if not callable(function):
        raise ValueError(
            f"{argument} ({spec!r}): {function_name} in {_origin(module)} is a "
            f"{type(function).__name__}, not a function."
        )
    return function  # type: ignore[no-any-return]


def import_module(spec: str, argument: str) -> ModuleType:
    """The module of `package.module:function`; Args and Raises as in `import_function`."""
    module_name, _, function_name = spec.partition(":")
    parts = [*module_name.split("."), function_name]
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"{argument} ({spec!r}) must have the form package.module:function.")
    # `python train.py` has its own directory on sys.path, not the current one. It comes last, and
    # stays: the function may import its neighbours when it is called.
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
    """The error for a name that is none of the built-in `names`: lists them and the nearest."""
    return ValueError(
        f"{argument} ({name!r}) must be one of {', '.join(names)}, or package.module:function."
        f"{_nearest(str(name), names)}"
    )


def one_line(error: BaseException) -> str:
    """An exception's type, message and line of the user's, in one line without a full stop."""
    text, line = f"{type(error).__name__}: {' '.join(str(error).split())}", line_of_error(error)
    return text.rstrip(".: ") + (f" ({line})" if line else "")


def _nearest(name: str, names: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name.lower(), names, n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def _origin(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or "built in"
