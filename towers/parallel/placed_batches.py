"""Keras' training function over batches whose shards reach the towers' devices a step ahead.

    Keras' loop:      train_function(iterator)   train_function(iterator) ...
    here:             [ step 1 ............. ]   [ step 2 ............. ] ...
    one more thread:  [ batch 2: to devices  ]   [ batch 3: to devices  ] ...
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from towers.workers.watch import watched
from towers.step import TowerStep
from towers.step.first_error import first_error, run_in_turn
from towers.step.prefetch import prefetched
from towers.step.row_counts import readable
from towers.step.structures import any_rows, components, map_tensors, packed


class PlacedBatches:
    """A function of an iterator over batches, as Keras' loop calls it: one step of the next one."""

    def __init__(self, step: TowerStep, update: Callable[..., dict[str, tf.Tensor]]) -> None:
        """
        Args:
            step: the towers.
            update: (x, y, sample_weight, placed) -> logs; it is traced.
        """
        self._step, self._update = step, update
        self._functions: dict[str, Callable] = {}  # by structure
        self._iterator: Any = None
        self._batches: Iterator[Any] = iter(())

    def __call__(self, iterator: Any) -> dict[str, tf.Tensor]:
        """Trains on the next batch; returns the logs.

        Raises:
            StopIteration: there is none.
        """
        if iterator is not self._iterator:
            self._iterator = iterator
            self._batches = prefetched(self._step, map(_present, iterator), to_devices=True)
        batch = next(self._batches)
        values = batch.x, batch.y, getattr(batch, "sample_weight", None)
        specs = [map_tensors(any_rows, each) for each in (values, batch.placed)]
        if str(specs) not in self._functions:
            self._functions[str(specs)] = self._function(*specs)
        with watched(self._step.cluster, "a train step"), readable(), first_error(
            lambda: run_in_turn(self._step, "train", *values)
        ):
            return self._functions[str(specs)](*components([values, batch.placed]))

    def _function(self, *specs: Any) -> Callable[..., dict[str, tf.Tensor]]:
        """The traced update: metrics may make variables in it, as in Keras' own function."""

        def train(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            given = iter(tensors)
            values, placed = (packed(each, given) for each in specs)
            return self._update(*values, placed)

        return tf.function(train, autograph=False, input_signature=components(list(specs)))

    def close(self) -> None:
        """Lets go of the iterator; a batch that was read ahead is lost."""
        self._iterator, self._batches = None, iter(())


def has_use(step: TowerStep | None, steps_per_execution: int, data: Any) -> bool:
    """Whether shards are to reach the devices a step ahead.

    Args:
        step: None before anything was traced.
        steps_per_execution: as compiled: Keras' own function can make several.
        data: what Keras gives its function; a `tf.data.Iterator` in `fit`.
    """
    if step is None or steps_per_execution > 1 or not isinstance(data, tf.data.Iterator):
        return False
    return step.policy.prefetch_to_devices


def let_go(function: Any) -> None:
    """Closes what Keras calls its training function, if it is one of these."""
    if isinstance(function, PlacedBatches):
        function.close()


def _present(element: Any) -> Any:
    """The element with None in place of what Keras marks as absent."""
    return keras.tree.map_structure(
        lambda v: None if isinstance(v, tf.experimental.Optional) else v, element
    )
