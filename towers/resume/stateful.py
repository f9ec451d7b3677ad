"""An iterable whose iterator, or itself, has a state: pass after pass, from any state on.

    state 0 | part 0 | state 1 | part 1 | state 2 | part 2 ...     read ahead of the steps
                                    ^ saved after step 1, and gone on from at once

Such are Grain's datasets and loaders, torchdata's StatefulDataLoader, and whatever has
`get_state()` and `set_state(value)`, or `state_dict()` and `load_state_dict(value)`.
"""

import base64
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_STATES_KEPT = 256  # more than is read ahead of the steps


def methods(value: Any) -> tuple[str, str] | None:
    """The names of the two methods by which it gives and takes its state; None: it has none."""
    return next((names for names in _METHODS if all(hasattr(value, n) for n in names)), None)


def has_state(value: Any) -> bool:
    """Whether it is an iterable that has a state, or whose iterators have one."""
    return hasattr(value, "__iter__") and bool(methods(value) or methods(iter(value)))


class Repeated:
    """The parts that an iterable gives, pass after pass, counted without an end.

    at: the number of the next part.
    """

    def __init__(self, source: Any, where: str, at: int = 0, saved: Any = None) -> None:
        """
        Args:
            source: see `has_state`.
            where: what it is, for the errors.
            at: the number of the first part.
            saved: of `saved`, where it goes on; None: at its beginning.
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
        """Raises ValueError where a whole pass gives nothing."""
        for part in self._iterator:
            self._is_anew = False
            self.at += 1
            return part
        if self._is_anew:
            raise ValueError(f"{self._where} gives nothing.")
        self._iterator, self._is_anew = iter(self._source), True
        return next(self)

    def note(self, since: int | None = None) -> None:
        """Keeps the state before the next part.

        Args:
            since: the states before this part are forgotten; None: all are but the newest ones and
                the first.
        """
        owner, names = self._owner()
        self._states[self.at] = copy.deepcopy(getattr(owner, names[0])())
        if since is not None:
            self._states = {at: state for at, state in self._states.items() if at >= since}
        elif len(self._states) > _STATES_KEPT:
            del self._states[sorted(self._states)[1]]

    def note_saved(self, at: int, saved: Any) -> None:
        """Keeps a state before a part, as `saved` has returned it."""
        self._states[at] = decoded(saved)

    def saved(self, at: int) -> Any:
        """The noted state before a part, as JSON values.

        Raises:
            ValueError: it holds what a checkpoint cannot hold.
        """
        try:
            return encoded(self._states[at])
        except ValueError as error:
            name = self._owner()[1][0]
            raise ValueError(f"{self._where}: its {name}() cannot be saved: {error}.") from None

    def go_to(self, at: int) -> None:
        """Goes on from a noted state; from None it begins a pass."""
        self.at, state = at, copy.deepcopy(self._states[at])
        of_source = methods(self._source)
        if of_source and state is not None:
            getattr(self._source, of_source[1])(state)
        self._iterator = iter(self._source)
        if not of_source and state is not None:
            owner, names = self._owner()
            getattr(owner, names[1])(state)
        self._is_anew = state is None  # else its pass may have nothing left

    def _owner(self) -> tuple[Any, tuple[str, str]]:
        """The object that has the state, and its two methods."""
        owner = self._source if methods(self._source) else self._iterator
        names = methods(owner)
        assert names is not None
        return owner, names


def encoded(value: Any) -> Any:
    """Numbers, text, bytes, lists, tuples, dicts, NumPy's and torch's arrays as JSON values.

    There is no pickle, which could run anything:
    {"at": 3, "order": array([2, 0])} -> {"dict": [["at", 3], ["order", {"array": ...}]]}

    Raises:
        ValueError: it is, or holds, anything else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encoded(part) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [encoded(part) for part in value]}
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
    """What `encoded` was given; a NumPy number comes back as an array of no dimensions."""
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
