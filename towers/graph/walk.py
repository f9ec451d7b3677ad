"""Walks through a traced graph by a stack: a graph may be deeper than Python's recursion limit."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TypeAlias, TypeVar

import tensorflow as tf

T = TypeVar("T")
# It identifies a tensor or an operation. A loop's graph may repeat names of the graph around it.
Key: TypeAlias = tuple[int, str]


def key_of(named: tf.Tensor | tf.Operation) -> Key:
    """Returns the key of a tensor or an operation: the id of its graph, and its name."""
    return id(named.graph), named.name


def follow(
    operation: tf.Operation, known: MutableMapping[Key, T],
    needs: Callable[[tf.Operation], Iterable[tf.Tensor]], infer: Callable[[tf.Operation], T],
) -> T:
    """Infers the value of an operation after the values of the operations before it.

    Args:
        operation: the operation.
        known: the known values by operation; new values are added.
        needs: returns the inputs of an operation whose operations must be known first.
        infer: returns the value of an operation, once all that it needs are known.
    """
    stack = [operation]
    while stack:
        last = stack[-1]
        if key_of(last) in known:
            stack.pop()
        elif unknown := [v.op for v in needs(last) if key_of(v.op) not in known]:
            stack.extend(unknown)
        else:
            known[key_of(last)] = infer(last)
    return known[key_of(operation)]


def before(
    tensors: Iterable[tf.Tensor], is_end: Callable[[tf.Tensor], bool]
) -> Iterator[tuple[tf.Tensor, bool]]:
    """Yields (tensor, whether it is an end) for tensors and all that they depend on, each once.

    Args:
        tensors: the start of the walk.
        is_end: returns whether the walk stops at a tensor.
    """
    stack, seen = list(tensors), set()
    while stack:
        tensor = stack.pop()
        if key_of(tensor) not in seen:
            seen.add(key_of(tensor))
            ends = is_end(tensor)
            yield tensor, ends
            if not ends:
                stack.extend(tensor.op.inputs)
