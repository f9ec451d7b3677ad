"""Walks through a traced graph by a stack: a graph may be deeper than Python's own."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TypeAlias, TypeVar

import tensorflow as tf

T = TypeVar("T")
# Of a tensor or an operation. A loop's graph may have the names of the one around it.
Key: TypeAlias = tuple[int, str]


def key_of(named: tf.Tensor | tf.Operation) -> Key:
    """By which a tensor or an operation is known: its graph, and its name."""
    return id(named.graph), named.name


def follow(
    operation: tf.Operation, known: MutableMapping[Key, T],
    needs: Callable[[tf.Operation], Iterable[tf.Tensor]], infer: Callable[[tf.Operation], T],
) -> T:
    """What follows for an operation from what is known of those before it.

    Args:
        operation: the operation.
        known: of operations, by their keys; grows.
        needs: an operation's inputs whose operations must be known first.
        infer: called for each operation that is not known, once all that it needs are.
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
    """(tensor, whether it is an end) of tensors and all that they follow from, each once.

    Args:
        tensors: where the walk begins.
        is_end: whether not to go on to what a tensor follows from.
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
