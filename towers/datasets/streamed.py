"""A tf.data.Dataset that memory does not hold: read anew in each epoch, shuffled within a buffer.

    records -> indices -> shuffled -> those of the steps that are done left out -> parsed
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from towers.datasets import pixels
from towers.datasets.memory_share import MEMORY_SHARE, fits, usable_memory
from towers.machine.devices import count_cores

Order = Callable[[tf.Tensor], tf.Tensor]  # a permutation of 0 ... N - 1

_MEND = "Mend it; `resume` then goes on from there."


@dataclass(frozen=True, eq=False)
class Streamed:
    """N examples that come one after the other.

    records: an unbatched tf.data.Dataset: of (x, y), or of what `parse` takes.
    where: what they are, for the errors.
    num_examples: N.
    parse: record -> (x, y), in TensorFlow operations; None: they are that already. It comes after
        shuffling, for records take less room than what they hold.
    """

    records: tf.data.Dataset
    where: str
    num_examples: int
    parse: Callable[[Any], Any] | None = None

    @property
    def element_spec(self) -> Any:
        """Of (x, y)."""
        return self.parsed(self.records.enumerate()).element_spec[1]

    @property
    def given_spec(self) -> Any:
        """Of (x, y) as they are parsed, before pixels are divided."""
        return self._parsed(self.records.enumerate()).element_spec[1]

    def identity(self) -> Sequence[str]:
        """What is known of the data without reading them."""
        return [str(self.element_spec)]

    def ordered(self, order: Callable[[int], Order]) -> tf.data.Dataset:
        """(index, record), as an epoch meets them, before they are shuffled.

        Args:
            order: of so many parts, if there are any: of a tf.data.Dataset there are none.
        """
        del order
        return self.records.enumerate()

    def parsed(self, records: tf.data.Dataset) -> tf.data.Dataset:
        """(index, record) -> (index, (x, y)), pixels divided, on all cores, in order."""
        parsed = self._parsed(records)
        if not pixels.has_pixels(parsed.element_spec[1]):
            return parsed

        @tf.autograph.experimental.do_not_convert
        def with_divided(index: tf.Tensor, example: Any) -> tuple[tf.Tensor, Any]:
            return index, pixels.with_divided_x(example)

        return parsed.map(with_divided, count_cores(), deterministic=True)

    def _parsed(self, records: tf.data.Dataset) -> tf.data.Dataset:
        parse = self.parse
        if parse is None:
            return records

        def parse_record(index: tf.Tensor, record: Any) -> tuple[tf.Tensor, Any]:
            x, y = parse(record)
            return index, (x, y)

        return records.map(parse_record, count_cores(), deterministic=True)

    def check(self, records: tf.data.Dataset) -> None:
        """Looks for the example that has failed in training.

        Args:
            records: (index, record), those of the batch that failed first.

        Raises:
            ValueError: a record cannot be read or parsed (naming its index).
        """
        with suppress(tf.errors.OpError):
            for index, record in records if self.parse is not None else ():
                self._check_one(int(index), record)
        last = -1
        try:
            for index, _ in self.records.enumerate():
                last = int(index)
        except tf.errors.OpError as error:
            raise ValueError(
                f"{self.where}: example {last + 1} cannot be read: {_cause(error)}. {_MEND}"
            ) from None

    def _check_one(self, index: int, record: Any) -> None:
        assert self.parse is not None
        try:
            self.parse(record)
        except Exception as error:  # whatever the user's function raises
            raise ValueError(
                f"{self.where}: example {index} cannot be parsed: {_cause(error)}. {_MEND}"
            ) from None


@dataclass(frozen=True, eq=False)
class StreamedBatches:
    """The batches of an epoch that are left; the one that cannot be read raises ValueError.

    split: whose examples they are.
    records: (index, record) of the examples left, in their order.
    batches: (x [B, ...], y [B, ...]), made of these.
    num_examples: how many of them are left.
    """

    split: Streamed
    records: tf.data.Dataset
    batches: tf.data.Dataset
    num_examples: int

    @property
    def element_spec(self) -> Any:
        return self.batches.element_spec

    def __iter__(self) -> Iterator[Any]:
        done = 0
        try:
            for batch in self.batches:
                done += int(tf.shape(tf.nest.flatten(batch)[0])[0])
                yield batch
        except tf.errors.OpError:  # it does not tell the example
            self.split.check(self.records.skip(done))
            raise
        if done < self.num_examples:
            raise ValueError(
                f"{self.split.where}: {self.num_examples - done:,} examples fewer than the "
                f"{self.split.num_examples:,} at the start. A run needs the same ones throughout: "
                "restore them, or start a new run."
            )


def fits_into_memory(dataset: tf.data.Dataset, num_examples: int) -> bool:
    """Whether N examples take at most a share of the memory; of an unknown shape: no."""
    size = _example_bytes(dataset)
    return size is not None and fits(num_examples * size)


def check_buffer(split: Streamed, shuffle_buffer: int) -> None:
    """Raises ValueError where what is shuffled takes more than a share of the memory."""
    size, count = _example_bytes(split.records), min(shuffle_buffer, split.num_examples)
    if size is not None and not fits(count * size):
        most = max(1, int(MEMORY_SHARE * usable_memory() / size))
        raise ValueError(
            f"shuffle_buffer ({shuffle_buffer}): so many examples of {size:,} bytes take more than "
            f"{MEMORY_SHARE:.0%} of the memory; use at most shuffle_buffer={most}. It decides the "
            "order of the examples, and stays the run's."
        )


def _example_bytes(dataset: tf.data.Dataset) -> int | None:
    """What one example takes, where its shape tells."""
    size = 0
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
            return None
        if spec.dtype in (tf.string, tf.resource, tf.variant):
            return None
        size += spec.shape.num_elements() * spec.dtype.size
    return size


def _cause(error: Exception) -> str:
    text = " ".join(str(getattr(error, "message", error)).split())
    # TensorFlow names its operations before the message and after it.
    return re.sub(r"\{\{.*?\}\}|.*::\S+|\[.*", "", text).strip(" .")
