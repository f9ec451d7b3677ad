"""Explains a keyword argument that does not exist, where another name is meant."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TypeVar

from towers.machine.words import nearest

_Function = TypeVar("_Function", bound=Callable[..., object])

# Names for one thing, which Keras, other libraries, or another function of towers use.
_SAME = (
    ("gpus", "num_gpus", "devices", "num_devices", "n_gpus"),
    ("num_towers", "towers", "num_replicas", "replicas"),
    ("learning_rate", "lr"),
    ("clip_norm", "clipnorm", "global_clipnorm"),
)


def names_checked(function: _Function) -> _Function:
    """Makes a function raise TypeError with the right name for an unknown keyword argument."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        for name in kwargs:
            if name not in known:
                is_class = function.__name__ == "__init__"
                if is_class:
                    title = type(args[0]).__name__
                else:
                    title = function.__name__
                raise unknown_argument(title, name, known)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def unknown_argument(function: str, name: str, known: Iterable[str]) -> TypeError:
    """Returns Python's error for an unknown argument, with the name that may be meant."""
    known = [each for each in known if each != "self"]
    same = [each for names in _SAME if name in names for each in names if each in known]
    if same:
        remedy = f" Did you mean {same[0]!r}?"
    else:
        remedy = nearest(name, known)
    return TypeError(f"{function}() has no argument {name!r}.{remedy}")
