"""Finds the attributes of custom callbacks that change in a run and that no checkpoint holds.

    on_train_begin    remembers the values
    checkpoint        warns of values that differ, unless a resumed epoch sets them again

A custom callback without get_state() and set_state(value) begins again in a resumed run.
"""

import dis
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

_BEGIN = ("__init__", "on_train_begin")  # each process calls them
_BEGIN_EPOCH = ("on_epoch_begin", "on_train_batch_begin", "on_batch_begin")
_LARGEST = 10_000  # the values in a container or an array that is compared
_UNKNOWN = object()  # stands for a value that is missing or cannot be compared


class Watched:
    """Watches the attributes of one callback, from the end of its `on_train_begin` on."""

    def __init__(self, callback: keras.callbacks.Callback, saved: Iterable[str]) -> None:
        """saved: the names of attributes that checkpoints hold for every callback."""
        self._callback, self._is_warned = callback, False
        classes = type(callback).__mro__
        keras = [c for c in classes if c.__module__.startswith("keras.")]
        self._custom = [c for c in classes if c not in keras]
        # Attributes of Keras' classes are saved, or `on_train_begin` makes them again.
        self._skipped = {*saved, *_accessed(keras, [n for c in keras for n in vars(c)])[1]}
        self._first = self._values()

    def warn_once(self, warn: Callable[[str], None], is_mid_epoch: bool) -> None:
        """Calls `warn` with one line if a checkpoint of now lacks attributes that have changed."""
        lost = [] if self._is_warned else self._lost(is_mid_epoch)
        if lost:
            self._is_warned = True
            name = type(self._callback).__name__
            warn(
                f"callback {name} has changed its {', '.join(lost)}, and no checkpoint holds such "
                "attributes, so that a resumed run begins with their first values. Define "
                f"get_state(), which returns JSON values, and set_state(value) in {name}. If "
                "nothing needs to be restored, return None."
            )

    def _lost(self, is_mid_epoch: bool) -> list[str]:
        """Returns the attributes that have changed and that a resumed run would not have."""
        values = self._values()
        changed = [k for k, v in values.items() if v != self._first.get(k, _UNKNOWN)]
        if not changed:
            return []
        read, assigned = _accessed(self._custom, _BEGIN_EPOCH)
        renewed = assigned - read
        if is_mid_epoch:  # then a value that the epoch's batches change is lost, such as a sum
            others = [n for c in self._custom for n in vars(c) if n not in (*_BEGIN, *_BEGIN_EPOCH)]
            renewed -= _accessed(self._custom, others)[1]
            renewed -= {k for k in changed if isinstance(values[k], list)}  # which may have grown
        return [name for name in changed if name not in renewed]

    def _values(self) -> dict[str, object]:
        """Returns a comparable copy of each attribute that a custom class has assigned."""
        values = getattr(self._callback, "__dict__", {})
        copies = {n: _copy(v) for n, v in values.items() if n not in self._skipped}
        return {n: v for n, v in copies.items() if v is not _UNKNOWN}


def _accessed(classes: Sequence[type], methods: Iterable[str]) -> tuple[set[str], set[str]]:
    """Returns the attributes that methods, and the methods that they call, read and assign."""
    read: set[str] = set()
    assigned: set[str] = set()
    names = list(methods)
    for name in names:  # grows by the methods that are called
        for instruction in _instructions(classes, name):
            if instruction.opname == "STORE_ATTR":
                assigned.add(instruction.argval)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                read.add(instruction.argval)
                if instruction.argval not in names:
                    names.append(instruction.argval)
    return read, assigned


def _instructions(classes: Sequence[type], method: str) -> Iterator[dis.Instruction]:
    """Yields the instructions of a method as each of the classes defines it."""
    for code in [getattr(vars(c).get(method), "__code__", None) for c in classes]:
        if code is not None:
            yield from dis.get_instructions(code)


def _copy(value: object, depth: int = 4) -> object:
    """Returns a copy of plain values and small containers or arrays of them; else _UNKNOWN."""
    if isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)  # NaN equals NaN
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        if len(value) > _LARGEST or depth == 0:
            return [len(value)]
        return [_copy(part, depth - 1) for part in value]
    value = value.value if isinstance(value, keras.Variable) else value
    if isinstance(value, tf.Tensor | tf.Variable) and hasattr(value, "numpy"):
        value = value.numpy() if (value.shape.num_elements() or 0) <= _LARGEST else _UNKNOWN
    if isinstance(value, np.ndarray | np.generic) and value.size <= _LARGEST:
        return value.dtype.str, value.shape, value.tobytes()
    return _UNKNOWN
