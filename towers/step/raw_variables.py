"""TensorFlow's own variables in a traced tower or step: read and assigned as Keras' are.

A tf.Variable that a layer keeps is no variable to Keras: no list has it, and no StatelessScope
knows of it. While a tower is traced, its reads and its assignments go to the scope, too:

    counter.assign_add(1.0)    -->  scope.add_update((RawVariable(counter), old + 1.0))
    x * codebook               -->  x * scope.get_current_value(RawVariable(codebook))

The calls are replaced in the process, and act in the thread that traces alone. What has no value of
its own to assign (`scatter_update`, a slice) is left to whoever checks the graph.
"""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import keras
import tensorflow as tf

from towers.graph.cut import captures
from towers.machine.keras_internals import stored_value
from towers.machine.replaced import ONE_AT_A_TIME, replaced
from towers.machine.tensorflow_internals import VARIABLE_CLASS
from towers.machine.user_lines import line_of

_SCOPE: ContextVar[keras.StatelessScope | None] = ContextVar("scope", default=None)
# By the id of the variable, which it keeps alive: one for each, as long as anybody has it.
_RAW: WeakValueDictionary[int, "RawVariable"] = WeakValueDictionary()
_AGGREGATIONS = {
    tf.VariableAggregation.MEAN: "mean",
    tf.VariableAggregation.SUM: "sum",
    tf.VariableAggregation.ONLY_FIRST_REPLICA: "only_first_replica",
}


class RawVariable:
    """A tf.Variable with the attributes by which towers know a variable of Keras'.

    value: the variable.
    """

    def __init__(self, variable: tf.Variable) -> None:
        """Args: variable: the tf.Variable."""
        self.value = variable
        self.path = self.name = variable.name.split(":")[0]
        self.shape, self.dtype = variable.shape, variable.dtype.name
        self.trainable = variable.trainable
        self.aggregation = _AGGREGATIONS.get(variable.aggregation, "none")

    def assign(self, value: tf.Tensor) -> None:
        """Gives the variable a value."""
        self.value.assign(value)

    def numpy(self) -> Any:
        """The value as an array."""
        return self.value.numpy()


def variable_behind(variable: Any) -> tf.Variable | None:
    """TensorFlow's variable behind a RawVariable or one of Keras'; None: it is still to be made."""
    return variable.value if isinstance(variable, RawVariable) else stored_value(variable)


@contextmanager
def raw_variables_in(scope: keras.StatelessScope) -> Iterator[None]:
    """Within, in this thread, the scope says what tf.Variables are read and assigned.

    Args:
        scope: its `get_current_value` and `add_update` take a RawVariable, too.
    """
    with ONE_AT_A_TIME, ExitStack() as stack:
        for name, function in _REPLACEMENTS.items():
            stack.enter_context(
                replaced(VARIABLE_CLASS, name, functools.partial(_in_a_scope, function=function))
            )
        with _current(scope):
            yield


@contextmanager
def read_as_they_are() -> Iterator[None]:
    """Within, in this thread, tf.Variables are TensorFlow's own again."""
    with _current(None):
        yield


@contextmanager
def _current(scope: keras.StatelessScope | None) -> Iterator[None]:
    token = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(token)


def check_closed(function: Any, reads: Collection[str] = ()) -> None:
    """Raises ValueError where a traced tower still uses a variable: all towers would share it.

    Args:
        function: the concrete function.
        reads: the names of tensors that are known to be a variable's value.
    """
    for handle, inside in captures(function):
        names = [variable.name for variable in function.variables if variable.handle is handle]
        users = [user for user in inside.consumers() if reads_none(user, reads)]
        if names and users:
            raise ValueError(
                f"{line_of(users[0])} uses tf.Variable {names[0]!r} in a way that towers cannot "
                f"follow ({users[0].type}). Read and assign only its whole value, outside of "
                "loops and tf.functions. Or make it with add_weight or keras.Variable, and draw "
                "noise from keras.random with a keras.random.SeedGenerator."
            )


def reads_none(operation: tf.Operation, reads: Collection[str]) -> bool:
    """Whether none of an operation's results is one of these reads."""
    return not any(output.name in reads for output in operation.outputs)


# What the calls become.


def _read(scope: keras.StatelessScope, variable: tf.Variable) -> tf.Tensor:
    return scope.get_current_value(_raw(variable))


def _assigned(new_value: Callable[[Callable, tf.Tensor], tf.Tensor]) -> Callable:
    """An assignment in a scope; `new_value`: (function that reads the old, argument) -> the new."""

    def assign(
        scope: keras.StatelessScope, variable: tf.Variable, value: Any, *args: Any, **options: Any
    ) -> tf.Tensor:
        del args, options  # use_locking, name, read_value
        given = tf.convert_to_tensor(value, variable.dtype)
        raw = _raw(variable)
        scope.add_update((raw, new_value(lambda: scope.get_current_value(raw), given)))
        return scope.get_current_value(raw)

    return assign


_REPLACEMENTS: dict[str, Callable] = {
    "value": _read,
    "read_value": _read,
    "sparse_read": lambda scope, v, indices, name=None: tf.gather(_read(scope, v), indices),
    "gather_nd": lambda scope, v, indices, name=None: tf.gather_nd(_read(scope, v), indices),
    "assign": _assigned(lambda old, given: given),
    "assign_add": _assigned(lambda old, given: old() + given),
    "assign_sub": _assigned(lambda old, given: old() - given),
}


def _raw(variable: tf.Variable) -> RawVariable:
    known = _RAW.get(id(variable))
    if known is None:
        known = _RAW[id(variable)] = RawVariable(variable)
    return known


def _in_a_scope(original: Callable, function: Callable) -> Callable:
    """A call of function(scope, variable, ...) where a scope is current."""

    def call(variable: tf.Variable, *args: Any, **options: Any) -> Any:
        scope = _SCOPE.get()
        if scope is None or tf.executing_eagerly():
            return original(variable, *args, **options)
        return function(scope, variable, *args, **options)

    return call
