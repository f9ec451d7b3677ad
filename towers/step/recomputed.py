"""keras.remat in a traced tower: activations that the backward pass computes again.

    forward:    x, parameters --> f --> y                   of all this only x, y stay
    backward:   x, parameters --> f again --> gradients     once the gradient of y is there

TensorFlow's own would read the parameters from their variables then, outside of the tower, and its
noise anew. Here `f` is called again with all that it had: the values of the scope, parameters and
seeds among them, the dtype and the `training` of its layer, the towers that it meets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf

from towers.machine.keras_internals import surroundings
from towers.machine.tensorflow_internals import recomputed_by
from towers.step.assigned import TowerScope
from towers.step.raw_variables import raw_variables_in


@contextmanager
def recomputed_in(
    scope: TowerScope, parameters: Sequence[tf.Tensor],
    meeting: Callable[[], AbstractContextManager],
) -> Iterator[None]:
    """Within, what keras.remat or tf.recompute_grad has wrapped is computed again in this tower.

    Args:
        scope: of the tower's forward pass.
        parameters: the values that gradients are taken of.
        meeting: makes the context in which the tower meets others.
    """

    def call(f: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        before, around = scope.as_now(), surroundings()
        given = tf.nest.flatten((args, kwargs), expand_composites=True)
        inputs = _Floats(given)
        result = f(*args, **kwargs)
        flat = tf.nest.flatten(result, expand_composites=True)
        outputs = _Floats(flat)

        def gradient(*upstream: tf.Tensor, variables: Sequence[Any] = ()) -> Any:
            upstream = upstream[:len(outputs.tensors)]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                late = _after(upstream, inputs.tensors)
                tape.watch([late, parameters])
                again_args, again_kwargs = tf.nest.pack_sequence_as(
                    (args, kwargs), inputs.replaced(late), expand_composites=True
                )
                with meeting(), before, raw_variables_in(before), around():
                    again = f(*again_args, **again_kwargs)
            targets = _Floats(tf.nest.flatten(again, expand_composites=True)).tensors
            found = tape.gradient(targets, [*late, *parameters], output_gradients=upstream)
            return (found, [None] * len(variables)) if variables else found

        @tf.custom_gradient
        def attached(*sources: tf.Tensor) -> Any:
            del sources
            return [tf.identity(output) for output in outputs.tensors], gradient

        if not outputs.tensors:
            return result
        attached_outputs = attached(*inputs.tensors, *parameters)
        return tf.nest.pack_sequence_as(
            result, outputs.replaced(attached_outputs), expand_composites=True
        )

    with recomputed_by(call):
        yield


class _Floats:
    """The tensors among flat values that have a gradient."""

    def __init__(self, flat: Sequence[Any]) -> None:
        self._flat = list(flat)
        self._places = [
            i for i, v in enumerate(flat) if tf.is_symbolic_tensor(v) and v.dtype.is_floating
        ]
        self.tensors = [flat[i] for i in self._places]

    def replaced(self, tensors: Sequence[tf.Tensor]) -> list[Any]:
        """The flat values with others in the place of these tensors."""
        flat = list(self._flat)
        for i, tensor in zip(self._places, tensors, strict=True):
            flat[i] = tensor
        return flat


def _after(upstream: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors, but not before the first of `upstream` is there, nor merged with the originals.

    XLA knows no control edges: what is added is 0, as no compiler can tell.
    """
    first = tf.reduce_max(tf.reshape(upstream[0], [-1])[:1])  # -inf where there is no row
    zero = tf.where(first == first, tf.zeros_like(first), first)  # NaN stays NaN
    return [tensor + tf.cast(zero, tensor.dtype) for tensor in tensors]
