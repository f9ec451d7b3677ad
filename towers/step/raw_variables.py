"""Redirects reads and assignments of tf.Variables in a traced tower to the tower's scope.

Keras does not list a tf.Variable that a layer holds, and a StatelessScope ignores it. While a tower
is traced, reads and assignments of these variables go to the scope, too:

    counter.assign_add(1.0)    -->  scope.add_update((RawVariable(counter), old + 1.0))
    x * codebook               -->  x * scope.get_current_value(RawVariable(codebook))

The methods are replaced for the whole process, but act only in the thread that traces. Partial
assignments (`scatter_update`, a slice) are not replaced; `check_closed` raises an error for them.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import keras
import tensorflow as tf

from towers.machine.keras_internals import stored_value
from towers.machine.replaced import ONE_AT_A_TIME, replaced
from towers.machine.tensorflow_internals import VARIABLE_CLASS
from towers.machine.user_lines import line_of

_SCOPE: ContextVar[keras.StatelessScope | None] = ContextVar("scope", default=None)
# By the variable's id: one RawVariable for each, which keeps the variable (and so the id) alive.
_RAW: WeakValueDictionary[int, "RawVariable"] = WeakValueDictionary()


class RawVariable:
    """Gives a tf.Variable, its `value`, the attributes of a Keras variable that towers use."""

    def __init__(self, variable: tf.Variable) -> None:
        self.value = variable
        self.path = self.name = variable.name.split(":")[0]
        self.shape, self.dtype = variable.shape, variable.dtype.name
        self.trainable = variable.trainable
        self.aggregation = variable.aggregation.name.lower()

    def assign(self, value: tf.Tensor) -> None:
        """Assigns a value to the variable."""
        self.value.assign(value)

    def numpy(self) -> Any:
        """Returns the value as an array."""
        return self.value.numpy()


def variable_behind(variable: Any) -> tf.Variable | None:
    """Returns the tf.Variable of a RawVariable or a Keras variable; None if it is not built."""
    return variable.value if isinstance(variable, RawVariable) else stored_value(variable)


@contextmanager
def raw_variables_in(scope: keras.StatelessScope) -> Iterator[None]:
    """Redirects tf.Variables to a scope, as RawVariables, inside the with block, in this thread."""
    with ONE_AT_A_TIME, ExitStack() as stack:
        for name, function in _REPLACEMENTS.items():
            make = functools.partial(_in_a_scope, function)
            stack.enter_context(replaced(VARIABLE_CLASS, name, make))
        with _current(scope):
            yield


def read_as_they_are() -> AbstractContextManager[None]:
    """Suspends `raw_variables_in` inside the with block, in this thread."""
    return _current(None)


@contextmanager
def _current(scope: keras.StatelessScope | None) -> Iterator[None]:
    token = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(token)


def check_closed(function: Any, reads: Collection[str] = ()) -> None:
    """Raises ValueError if a traced tower uses variables, except to make the tensors `reads`."""
    for handle, inside in function.graph.captures:
        names = [variable.name for variable in function.variables if variable.handle is handle]
        users = [user for user in inside.consumers() if reads_none(user, reads)]
        if names and users:
            raise ValueError(
                f"{line_of(users[0])} uses tf.Variable {names[0]!r} in a way that towers cannot "
                f"follow ({users[0].type}). Read and assign its whole value, outside of loops and "
                "tf.functions. Or make it with add_weight; draw noise with keras.random."
            )


def reads_none(operation: tf.Operation, reads: Collection[str]) -> bool:
    """Whether no result of an operation is one of these reads."""
    return not any(output.name in reads for output in operation.outputs)


def _raw(variable: tf.Variable) -> RawVariable:
    return _RAW.get(id(variable)) or _RAW.setdefault(id(variable), RawVariable(variable))


def _read(scope: keras.StatelessScope, variable: tf.Variable) -> tf.Tensor:
    return scope.get_current_value(_raw(variable))


def _assigned(combine: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None) -> Callable:
    """Returns a replacement that assigns its argument, or combine(old value, argument)."""
    def assign(
        scope: keras.StatelessScope, variable: tf.Variable, value: Any, *_args: Any, **_options: Any
    ) -> tf.Tensor:  # ignores use_locking, name and read_value
        raw, new = _raw(variable), tf.convert_to_tensor(value, variable.dtype)
        if combine is not None:
            new = combine(scope.get_current_value(raw), new)
        scope.add_update((raw, new))
        return scope.get_current_value(raw)

    return assign


_REPLACEMENTS: dict[str, Callable] = {
    "value": _read, "read_value": _read,
    "sparse_read": lambda scope, v, indices, name=None: tf.gather(_read(scope, v), indices),
    "gather_nd": lambda scope, v, indices, name=None: tf.gather_nd(_read(scope, v), indices),
    "assign": _assigned(), "assign_add": _assigned(operator.add),
    "assign_sub": _assigned(operator.sub),
}


def _in_a_scope(function: Callable, original: Callable) -> Callable:
    """Returns a method that calls function(scope, variable, ...) if a scope is set."""
    def call(variable: tf.Variable, *args: Any, **options: Any) -> Any:
        scope = _SCOPE.get()
        if scope is None or tf.executing_eagerly():
            return original(variable, *args, **options)
        return function(scope, variable, *args, **options)

    return call
