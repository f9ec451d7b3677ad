"""Keras' training function over batches whose shards reach the towers' devices a step ahead.

    Keras' loop:      train_function(iterator)   train_function(iterator) ...
    here:             [ step 1 ............. ]   [ step 2 ............. ] ...
    one more thread:  [ batch 2: to devices  ]   [ batch 3: to devices  ] ...
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from towers.step import TowerStep
from towers.step.prefetch import prefetched
from towers.step.traced import TracedGraphs


class PlacedBatches:
    """A function of an iterator over batches, as Keras' loop calls it: one step of the next one."""

    def __init__(self, step: TowerStep, update: Callable[..., dict[str, tf.Tensor]]) -> None:
        """
        Args:
            step: the towers.
            update: (x, y, sample_weight, placed) -> logs; it is traced.
        """
        self._step, self._update = step, update
        self._graphs = TracedGraphs(step.cluster, lambda: None)
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
        x, y, sample_weight = batch.x, batch.y, getattr(batch, "sample_weight", None)
        return self._graphs.call(self._train, x, y, sample_weight, behind=[batch.placed])

    def _train(self, *batch: Any) -> dict[str, tf.Tensor]:
        return self._update(*batch)

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
