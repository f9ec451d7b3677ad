"""Replaces Keras' training function by one that copies shards to the devices one step ahead.

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
    """A train function for Keras' loop: takes an iterator and trains on its next batch."""

    def __init__(self, step: TowerStep, update: Callable[..., dict[str, tf.Tensor]]) -> None:
        """
        Args:
            step: the step that splits batches into shards.
            update: (x, y, sample_weight, placed) -> logs; it is traced by `tf.function`.
        """
        self._step, self._update = step, update
        self._functions: dict[str, Callable] = {}  # by the specs of a batch
        self._iterator: Any = None
        self._batches: Iterator[Any] = iter(())

    def __call__(self, iterator: Any) -> dict[str, tf.Tensor]:
        """Trains on the next batch and returns the logs.

        Raises:
            StopIteration: there is no next batch.
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
        """Returns `update` as a `tf.function` for these specs. Its trace may create metrics."""

        def train(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            given = iter(tensors)
            values, placed = (packed(each, given) for each in specs)
            return self._update(*values, placed)

        return tf.function(train, autograph=False, input_signature=components(list(specs)))

    def close(self) -> None:
        """Drops the iterator. A batch that was read ahead is lost."""
        self._iterator, self._batches = None, iter(())


def can_prefetch(step: TowerStep | None, steps_per_execution: int, data: Any) -> bool:
    """Returns whether `PlacedBatches` should replace Keras' training function.

    Args:
        step: the step that trains, or None before it exists.
        steps_per_execution: the model's value; only Keras' function makes several steps in a call.
        data: the argument of Keras' training function; `fit` passes a `tf.data.Iterator`.
    """
    if step is None or steps_per_execution > 1 or not isinstance(data, tf.data.Iterator):
        return False
    return step.policy.prefetch_to_devices


def close_batches(function: Any) -> None:
    """Closes the model's train function if it is a PlacedBatches."""
    if isinstance(function, PlacedBatches):
        function.close()


def _present(element: Any) -> Any:
    """Replaces the parts that Keras marks as absent by None."""
    return keras.tree.map_structure(
        lambda v: None if isinstance(v, tf.experimental.Optional) else v, element
    )
