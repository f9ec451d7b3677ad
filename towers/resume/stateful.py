"""Reads an iterable with a state pass after pass, from any saved state on.

    state 0 | part 0 | state 1 | part 1 | state 2 | part 2 ...     read ahead of the steps
                                    ^ saved after step 1; a run resumes from it

Examples are Grain's datasets and loaders, and torchdata's StatefulDataLoader. The iterable or its
iterator has get_state() and set_state(value), or state_dict() and load_state_dict(value).
"""

import base64
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_STATES_KEPT = 256  # more than is read ahead of the steps


def methods(value: Any) -> tuple[str, str] | None:
    """Returns the names of the methods that get and set the state; None if there are none."""
    return next((names for names in _METHODS if all(hasattr(value, n) for n in names)), None)


def has_state(value: Any) -> bool:
    """Returns whether `value` is an iterable that has a state, or whose iterator has one."""
    return hasattr(value, "__iter__") and bool(methods(value) or methods(iter(value)))


class Repeated:
    """Yields the parts of an iterable, pass after pass; `at` is the next one's number over all."""

    def __init__(self, source: Any, where: str, at: int = 0, saved: Any = None) -> None:
        """
        where: the name of the source, for errors.
        saved: the result of `saved` from which to resume; None begins a pass.
        """
        self._source, self._where = source, f"{where} ({type(source).__name__})"
        self._iterator: Iterator[Any] = iter(())
        self._states: dict[int, Any] = {}
        self.note_saved(at, saved)
        self.go_to(at)
        if saved is None:
            self.note()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Returns the next part. Raises ValueError if a whole pass gives none."""
        for part in self._iterator:
            self._is_anew = False
            self.at += 1
            return part
        if self._is_anew:
            raise ValueError(f"{self._where} gives nothing.")
        self._iterator, self._is_anew = iter(self._source), True
        return next(self)

    def note(self, since: int | None = None) -> None:
        """Keeps the state before the next part; drops older ones, or all but the first and 255.

        since: the number of the first part whose state is kept.
        """
        owner, names = self._owner()
        self._states[self.at] = copy.deepcopy(getattr(owner, names[0])())
        if since is not None:
            self._states = {at: state for at, state in self._states.items() if at >= since}
        elif len(self._states) > _STATES_KEPT:
            del self._states[sorted(self._states)[1]]

    def note_saved(self, at: int, saved: Any) -> None:
        """Keeps the state before part `at`, which `saved` returned in an earlier process."""
        self._states[at] = decoded(saved)

    def saved(self, at: int) -> Any:
        """Returns the noted state before part `at`, as JSON values."""
        try:
            return encoded(self._states[at])
        except ValueError as error:
            name = self._owner()[1][0]
            raise ValueError(f"{self._where}: its {name}() cannot be saved: {error}.") from None

    def go_to(self, at: int) -> None:
        """Moves to part `at`, whose state was noted. If the state is None, begins a pass."""
        self.at, state = at, copy.deepcopy(self._states[at])
        of_source = methods(self._source)
        if of_source and state is not None:
            getattr(self._source, of_source[1])(state)
        self._iterator = iter(self._source)
        if not of_source and state is not None:
            owner, names = self._owner()
            getattr(owner, names[1])(state)
        self._is_anew = state is None  # a pass from a state may have no parts left

    def _owner(self) -> tuple[Any, tuple[str, str]]:
        """Returns the object that has the state, and the names of its two methods."""
        owner = self._source if methods(self._source) else self._iterator
        names = methods(owner)
        assert names is not None
        return owner, names


def encoded(value: Any) -> Any:
    """Encodes numbers, text, bytes, lists, tuples, dicts and NumPy or torch arrays as JSON values.

    {"at": 3, "order": array([2, 0])} -> {"dict": [["at", 3], ["order", {"array": ...}]]}
    Other types raise ValueError: pickle, which takes all types, can run any code.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        parts = [encoded(part) for part in value]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(part)] for key, part in value.items()]}
    if type(value).__module__ == "torch" and hasattr(value, "numpy"):
        return {"torch": encoded(value.numpy())}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU":
        array = np.asarray(value)
        return {"array": [array.dtype.str, list(array.shape), encoded(array.tobytes())]}
    raise ValueError(
        f"a {type(value).__name__} is none of numbers, text, bytes, arrays, lists, tuples and dicts"
    )


def decoded(value: Any) -> Any:
    """Decodes a result of `encoded`. A NumPy number becomes an array without dimensions."""
    if isinstance(value, list):
        return [decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "bytes":
        return base64.b64decode(held)
    if kind == "tuple":
        return tuple(decoded(part) for part in held)
    if kind == "dict":
        return {decoded(key): decoded(part) for key, part in held}
    if kind == "torch":
        import torch

        return torch.from_numpy(decoded(held))
    dtype, shape, data = held
    return np.frombuffer(decoded(data), np.dtype(dtype)).reshape(shape).copy()
