"""Replaces keras.remat in a traced tower, so that the backward pass can compute activations again.

    forward:    x, parameters --> f --> y                   memory keeps only x and y
    backward:   x, parameters --> f again --> gradients     starts once y's gradient is computed

TensorFlow's version would read the parameters from their variables, outside of the tower, and draw
other noise. Here `f` is called again in the first call's context: the scope's values (parameters
and seeds), the layer's dtype and `training`, and the sums over towers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf

from towers.machine.keras_internals import surroundings
from towers.machine.tensorflow_internals import recomputed_by
from towers.step.assigned import TowerScope
from towers.step.raw_variables import raw_variables_in


@contextmanager
def called_in(scope: TowerScope, meeting: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Gives layers the scope's values, within `meeting()`; recomputes what keras.remat wraps."""
    def call(f: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        before, around = scope.as_now(), surroundings()
        inputs = args, kwargs
        graph = tf.compat.v1.get_default_graph()
        earlier = {op.name for op in graph.get_operations()}
        outputs = f(*args, **kwargs)
        read = _read_since(graph, earlier)
        floats, results = _floats(read), _floats(outputs)

        def gradient(*upstream: tf.Tensor) -> Any:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                late = _after(upstream, _floats(inputs))
                tape.watch([late, floats])
                again_args, again_kwargs = _replace_floats(inputs, late)
                with called_in(before, meeting), around():
                    again = _floats(f(*again_args, **again_kwargs))
            return tape.gradient(again, [*late, *floats], output_gradients=upstream)

        @tf.custom_gradient
        def attached(*sources: tf.Tensor) -> Any:
            del sources
            return list(map(tf.identity, results)), gradient

        if not results or any(tensor.dtype == tf.variant for tensor in read):
            return outputs  # with the usual gradient, which keeps the activations
        return _replace_floats(outputs, attached(*_floats(inputs), *floats))

    with meeting(), scope, raw_variables_in(scope), recomputed_by(call):
        yield


def _read_since(graph: tf.Graph, earlier: set[str]) -> list[tf.Tensor]:
    """Returns the tensors that new operations read from `earlier` ones, such as parameters."""
    made = [op for op in graph.get_operations() if op.name not in earlier]
    new = set(made)
    read = [tensor for op in made for tensor in op.inputs if tensor.op not in new]
    read += [outer for outer, inner in getattr(graph, "captures", ()) if inner.op in new]
    return list({tensor.ref(): tensor for tensor in read}.values())


def _is_float(value: Any) -> bool:
    """Whether a value is a tensor that can have a gradient."""
    return tf.is_symbolic_tensor(value) and (value.dtype.is_floating or value.dtype.is_complex)


def _floats(structure: Any) -> list[tf.Tensor]:
    return list(filter(_is_float, tf.nest.flatten(structure, expand_composites=True)))


def _replace_floats(structure: Any, tensors: Iterable[tf.Tensor]) -> Any:
    """Returns the structure with other tensors in the place of `_floats(structure)`."""
    others = iter(tensors)
    return tf.nest.map_structure(
        lambda v: next(others) if _is_float(v) else v, structure, expand_composites=True
    )


def _after(upstream: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns copies of the tensors that exist only once the first of `upstream` is computed.

    XLA ignores control edges, so -0 is added, the only number that changes no value. No compiler
    can prove that it is -0, and merge the copies with the originals.
    """
    first = tf.math.real(tf.reshape(upstream[0], [-1])[:1])
    first = tf.reduce_max(first)  # -inf if there is no row
    zero = tf.where(first == first, -tf.zeros_like(first), first)  # NaN stays NaN
    return [tensor + tf.cast(zero, tensor.dtype) for tensor in tensors]
