"""Attributes that are another's for a while: methods that towers watch while they trace."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

ONE_AT_A_TIME = threading.RLock()  # two threads would put back each other's replacements


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within, an attribute of a class, a module or an object is what `make` makes of it."""
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
    """Within, an attribute of a class, a module or an object is `value`."""
    return replaced(owner, name, lambda _: value)


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:
        vars(owner)[name] = value  # an object of Keras' would track what it is given
