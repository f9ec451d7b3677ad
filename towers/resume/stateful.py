"""Reads an iterable with a state pass after pass, from any saved state on.

    state 0 | part 0 | state 1 | part 1 | state 2 | part 2 ...     read ahead of the steps
                                    ^ saved after step 1; a run resumes from it

Examples are Grain's datasets and loaders, and torchdata's StatefulDataLoader. The iterable or its
iterator has get_state() and set_state(value), or state_dict() and load_state_dict(value).
"""

import base64
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, Union

import numpy as np

# A value of JSON.
Json: TypeAlias = Union[None, bool, int, float, str, Sequence["Json"], Mapping[str, "Json"]]
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def methods(value: object) -> tuple[str, str] | None:
    """Returns the names of the methods that get and set the state; None if there are none."""
    return next((names for names in _METHODS if all(hasattr(value, n) for n in names)), None)


def has_state(value: object) -> bool:
    """Returns whether `value` is an iterable that has a state, or whose iterator has one."""
    return hasattr(value, "__iter__") and bool(methods(value) or methods(iter(value)))


class Repeated:
    """Yields the parts of an iterable, pass after pass; `at` is the next one's number over all."""

    def __init__(
        self, source: Iterable[object], where: str, at: int = 0, saved: Json = None
    ) -> None:
        """
        where: the name of the source, for errors.
        saved: the result of `saved` from which to resume; None begins a pass.
        """
        self._source, self._where = source, f"{where} ({type(source).__name__})"
        self.at, state = at, decoded(saved)
        self._states = {at: copy.deepcopy(state)}  # by the number of the next part
        of_source = methods(source)
        if of_source and state is not None:
            getattr(source, of_source[1])(state)
        self._iterator: Iterator[object] = iter(source)
        self._is_anew = state is None  # a pass from a state may have no parts left
        if state is None:
            self.note(at)
        elif not of_source:
            owner, names = self._owner()
            getattr(owner, names[1])(state)

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        """Returns the next part. Raises ValueError if a whole pass gives none."""
        for part in self._iterator:
            self._is_anew = False
            self.at += 1
            return part
        if self._is_anew:
            raise ValueError(f"{self._where} gives nothing.")
        self._iterator, self._is_anew = iter(self._source), True
        return next(self)

    def note(self, since: int) -> None:
        """Keeps the state before the next part; drops states before part number `since`."""
        owner, names = self._owner()
        states = {**self._states, self.at: copy.deepcopy(getattr(owner, names[0])())}
        self._states = {at: state for at, state in states.items() if at >= since}

    def saved(self, at: int) -> Json:
        """Returns the noted state before part `at`, as JSON values."""
        try:
            return encoded(self._states[at])
        except ValueError as error:
            name = self._owner()[1][0]
            raise ValueError(f"{self._where}: its {name}() cannot be saved: {error}.") from None

    def _owner(self) -> tuple[object, tuple[str, str]]:
        """Returns the object that has the state, and the names of its two methods."""
        if methods(self._source):
            owner = self._source
        else:
            owner = self._iterator
        names = methods(owner)
        assert names is not None
        return owner, names


def encoded(value: object) -> Json:
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
        if isinstance(value, tuple):
            return {"tuple": parts}
        return parts
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
