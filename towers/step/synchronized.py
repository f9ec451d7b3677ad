"""BatchNormalization with one mean and variance over the examples of all towers.

    tower 0   sum(x), n  --+                          +-->  mean, variance   (the same everywhere)
    tower 1   sum(x), n  --+-- all-reduce, forward  --+-->  mean, variance
    ...                        and backward

Its output, statistics and gradient equal the large batch's. The towers wait for each other in
every such layer, so each needs a device of its own.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from towers.machine.collectives import next_group_key
from towers.machine.keras_internals import all_layers, moments_replaced

_INSTANCE_KEYS = itertools.count(1)


def synchronized_layers(model: keras.Model, batch_norm: str) -> list[keras.layers.Layer]:
    """The BatchNormalization layers to synchronize: all with batch_norm="synchronized", else those
    with `synchronized=True`, which Keras by itself honours under tf.distribute alone."""
    return [
        layer
        for layer in all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and (batch_norm == "synchronized" or layer.synchronized)
    ]


class TowerGroup:
    """The towers of one step, which add up their statistics in chosen layers."""

    def __init__(self, num_towers: int, layers: Sequence[keras.layers.Layer]) -> None:
        """Args: T, at least 2 towers, each on a device of its own; the layers."""
        self._num_towers = num_towers
        self._layers = layers
        self._key = next_group_key()

    @contextmanager
    def synchronize(self, is_real: tf.Tensor) -> Iterator[None]:
        """Within, the layers' moments are those of all towers.

        Args:
            is_real: scalar bool, False for the one row that stands for an empty shard.
        """
        with ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(moments_replaced(layer, self._all_moments(layer, is_real)))
            yield

    def _all_moments(self, layer: keras.layers.Layer, is_real: tf.Tensor) -> Callable:
        """(inputs, mask) -> mean and variance over all towers, by Keras' formulas."""

        def moments(inputs: tf.Tensor, mask: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
            axes = list(range(inputs.shape.rank))
            del axes[layer.axis]
            valid = tf.ones_like(inputs) if mask is None else tf.where(
                mask[..., tf.newaxis], tf.ones_like(inputs), 0
            )
            valid = tf.where(is_real, valid, 0)
            count = self.all_reduce(tf.reduce_sum(valid, axes))
            if mask is not None:
                count += tf.cast(keras.config.epsilon(), count.dtype)
            mean = self.all_reduce(tf.reduce_sum(inputs * valid, axes)) / count
            shape = [-1 if i not in axes else 1 for i in range(inputs.shape.rank)]
            difference = (inputs - tf.reshape(mean, shape)) * valid
            return mean, self.all_reduce(tf.reduce_sum(tf.square(difference), axes)) / count

        return moments

    def all_reduce(self, value: tf.Tensor) -> tf.Tensor:
        """The sum of the towers' values. Its gradient is the sum of the towers' gradients.

        Every use, and its gradient, has an instance key of its own: all towers run the same trace,
        so the same operation meets its like in the others.
        """
        keys = [next(_INSTANCE_KEYS), next(_INSTANCE_KEYS)]

        @tf.custom_gradient
        def reduce(x: tf.Tensor) -> tuple:
            return self._collective(x, keys[0]), lambda dy: self._collective(dy, keys[1])

        return reduce(value)

    def _collective(self, value: tf.Tensor, instance_key: int) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduce(
            input=value,
            group_size=self._num_towers,
            group_key=self._key,
            instance_key=instance_key,
            merge_op="Add",
            final_op="Id",
            subdiv_offsets=[0],
        )


def check_synchronized(
    layers: Sequence[keras.layers.Layer], num_towers: int, num_devices: int, jit_compile: bool
) -> None:
    """Raises ValueError where towers that wait for each other share a device, or are compiled."""
    if layers and jit_compile:
        raise ValueError(
            "jit_compile=True cannot compile towers that synchronize their BatchNormalization "
            f"(layer {layers[0].name!r}). Use batch_norm=average, or jit_compile=False."
        )
    if layers and num_towers > num_devices:
        raise ValueError(
            f"batch_norm=synchronized (layer {layers[0].name!r}) needs one device for each tower:"
            f" there are {num_towers} towers on {num_devices} devices. Use "
            f"num_towers={num_devices}, or batch_norm=average."
        )
