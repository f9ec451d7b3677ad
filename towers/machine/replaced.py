"""Replaces attributes for a while, such as methods whose calls towers records in a trace."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

ONE_AT_A_TIME = threading.RLock()  # two threads would restore each other's replacements


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the context, an attribute of a class, module or object is `make(original)`."""
    original, is_own = getattr(owner, name), name in vars(owner)
    _put(owner, name, make(original))
    try:
        yield
    finally:
        if is_own:
            _put(owner, name, original)
        elif isinstance(owner, type):
            delattr(owner, name)
        else:
            del vars(owner)[name]


def replaced_by(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """Inside the context, an attribute of a class, module or object is `value`."""
    return replaced(owner, name, lambda _: value)


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:
        vars(owner)[name] = value  # with setattr, a Keras object would track the value
