"""An iterable whose iterator, or itself, has a state: pass after pass, from any state on.

Such are Grain's datasets and loaders, torchdata's StatefulDataLoader, and whatever has
`get_state()` and `set_state(value)`, or `state_dict()` and `load_state_dict(value)`.
"""

import copy
from collections.abc import Iterator
from typing import Any

_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def methods(value: Any) -> tuple[str, str] | None:
    """The names of the two methods by which it gives and takes its state; None: it has none."""
    return next((names for names in _METHODS if all(hasattr(value, n) for n in names)), None)


def has_state(value: Any) -> bool:
    """Whether it is an iterable that has a state, or whose iterators have one."""
    return hasattr(value, "__iter__") and bool(methods(value) or methods(iter(value)))


class Repeated:
    """What an iterable gives, pass after pass."""

    def __init__(self, source: Any, where: str, saved: Any = None) -> None:
        """
        Args:
            source: see `has_state`.
            where: what it is, for the errors.
            saved: of `state`, where it goes on; None: at its beginning.
        """
        self._source, self._where = source, where
        self._iterator: Iterator[Any] = iter(())
        self.go_to(saved)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Raises ValueError where a whole pass gives nothing."""
        for element in self._iterator:
            self._is_anew = False
            return element
        if self._is_anew:
            raise ValueError(f"{self._where} ({type(self._source).__name__}) gives nothing.")
        self._iterator, self._is_anew = iter(self._source), True
        return next(self)

    def state(self) -> Any:
        """Where it stands, as the iterable says it."""
        return copy.deepcopy(getattr(self._owner, self.state_method)())

    def go_to(self, saved: Any) -> None:
        """Goes on from a state; None: begins a pass."""
        of_source = methods(self._source)
        if of_source and saved is not None:
            getattr(self._source, of_source[1])(copy.deepcopy(saved))
        self._iterator = iter(self._source)
        of_iterator = methods(self._iterator)
        if of_iterator and not of_source and saved is not None:
            getattr(self._iterator, of_iterator[1])(copy.deepcopy(saved))
        self._is_anew = saved is None  # else its pass may have nothing left

    @property
    def state_method(self) -> str:
        """The name of the method that gives the state."""
        names = methods(self._owner)
        assert names is not None
        return names[0]

    @property
    def _owner(self) -> Any:
        return self._source if methods(self._source) else self._iterator
