"""Examples in memory, in the order of a seed and an epoch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from towers.resume.source import DataSource, Epoch, InputOptions, as_written, of_batches
from towers.step.tensor_rows import gather_rows


@dataclass(frozen=True, eq=False)
class InMemory(DataSource):
    """N examples in memory.

    parts: (x [N, ...], y [N]), or structures of such arrays; tensors on the CPU once opened.
    """

    parts: tuple[Any, ...]

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        return int(tf.nest.flatten(self.parts)[-1].shape[0])

    @property
    def labels(self) -> Any:
        return self.parts[1]

    def opened(self, options: InputOptions) -> "InMemory":
        with tf.device("/cpu:0"):
            tensors = tf.nest.map_structure(
                tf.convert_to_tensor, self.parts, expand_composites=True
            )
        return InMemory(tensors)

    def identity(self) -> Iterator[Any]:
        """All that they hold; None is nothing."""
        for part in tf.nest.flatten(self.parts, expand_composites=True):
            if part is not None:
                values = part.numpy().reshape(-1)
                yield f"{part.dtype.name} {part.shape}".encode()
                yield b"\0".join(values) if part.dtype == tf.string else values.view(np.uint8).data

    def batches(self, epoch: Epoch) -> tf.data.Dataset:
        parts = self.parts

        # The function captures the tensors; as constants they would be limited to protobuf's 2 GB.
        @as_written
        def rows(index: tf.Tensor) -> Any:
            return index, tf.nest.map_structure(lambda part: gather_rows(part, index), parts)

        return of_batches(epoch.indices(self.num_examples).map(rows), epoch)
