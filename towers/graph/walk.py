"""Walks through a traced graph by a stack: a graph may be deeper than Python's recursion limit."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

T = TypeVar("T")
Key: TypeAlias = tuple[int, str]


def key_of(named: tf.Tensor | tf.Operation) -> Key:
    """Returns the id of the graph and the name: a loop's graph may repeat names around it."""
    return id(named.graph), named.name


def follow(
    operation: tf.Operation, known: MutableMapping[Key, T],
    needs: Callable[[tf.Operation], Iterable[tf.Tensor]], infer: Callable[[tf.Operation], T],
) -> T:
    """Returns the value that `infer` gives an operation, and adds it to `known`.

    It calls `infer` first for the operations of the inputs that `needs` returns, and so on.
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
    """Yields (tensor, is_end(tensor)) for tensors and all that they depend on, up to the ends."""
    stack, seen = list(tensors), set()
    while stack:
        tensor = stack.pop()
        if key_of(tensor) not in seen:
            seen.add(key_of(tensor))
            ends = is_end(tensor)
            yield tensor, ends
            if not ends:
                stack.extend(tensor.op.inputs)


def source(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that a chain of Identity operations passes on."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def replace_tensors(structure: Any, new: Mapping[str, tf.Tensor]) -> Any:
    """Returns a structure in which `new` tensors stand for the tensors of these names."""
    return tf.nest.map_structure(
        lambda v: new.get(v.name, v) if tf.is_symbolic_tensor(v) else v,
        structure, expand_composites=True,
    )
