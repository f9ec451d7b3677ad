"""Replaces attributes for a while, such as methods whose calls towers records in a trace."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the context, an attribute of a class, module or object is `make(original)`."""
    original, is_own, is_class = getattr(owner, name), name in vars(owner), isinstance(owner, type)
    # With setattr, a Keras object would track the value.
    if is_class:
        put = functools.partial(setattr, owner)
    else:
        put = vars(owner).__setitem__
    put(name, make(original))
    try:
        yield
    finally:
        if is_own:
            put(name, original)
        elif is_class:
            delattr(owner, name)
        else:
            del vars(owner)[name]


def replaced_by(owner: object, name: str, value: object) -> AbstractContextManager[None]:
    """Inside the context, an attribute of a class, module or object is `value`."""
    return replaced(owner, name, lambda _: value)
