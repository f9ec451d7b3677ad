"""Makes the data of `fit` begin at any step of any epoch.

| data                                  | order of an epoch        | batches that are done         |
| ------------------------------------- | ------------------------ | ----------------------------- |
| arrays                                | depends on (seed, epoch) | are skipped, not read         |
| a PyDataset, batches by index         | depends on (seed, epoch) | are skipped, not read         |
| a tf.data.Dataset                     | set by the dataset       | are read again, in this epoch |
| with steps_per_epoch, or a generator  | set by the data          | are read again, in all epochs |
| an iterable with a state (`stateful`) | set by the iterable      | are skipped, not read         |

Each epoch has all its batches, so that Keras can count them. In a resumed epoch, `fit` drops the
first batches, which are done. They may be empty.
"""

import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.resume.source import InMemory, num_steps, prepare_ahead, sha256, shuffled
from towers.resume.stateful import Repeated, has_state
from towers.step.structures import (
    as_tensor, batch_specs, gather_rows, is_composite, is_scipy, map_tensors, take_rows,
)

_ENDLESS = tf.int64.max


@dataclass(frozen=True)
class Start:
    """Says at which epoch and step the data begin, and the seed of their order.

    first: the initial epoch of the first process. epoch: the epoch that is under way.
    step: the number of steps of `epoch` that are done. seed: the seed of the examples' order.
    steps_per_epoch: the argument of `fit`, rounded up to whole executions; None: all data.
    """

    seed: int
    first: int = 0
    epoch: int = 0
    step: int = 0
    steps_per_epoch: int | None = None


class Data:
    """Data that begin at a Start.

    x: the argument for Keras' fit. skipped: how many batches of x to read before this epoch's.
    num_batches: the number of batches of an epoch without steps_per_epoch; None if not known.
    length: the number of batches of a pass, for batches by index; None if they have no end.
    spec: the spec of one batch. identity: values that must not differ in a resumed fit.
    """

    x: Any
    spec: Any
    identity: dict[str, Any]
    skipped = 0
    num_batches: int | None = None
    length: int | None = None

    def __init__(self, start: Start) -> None:
        self._start = start

    @property
    def most_steps(self) -> int:
        """Returns the most steps of an epoch. Keras may count more: it counts whole executions."""
        is_known = self.num_batches is not None and self._start.steps_per_epoch is None
        return self.num_batches if is_known else sys.maxsize  # type: ignore[return-value]

    def batches_before(self, epoch: int) -> int:
        """Returns the number of batches that all epochs before `epoch` have.

        With steps_per_epoch, counts to the start: Keras makes one iterator, which does not end.
        """
        start = self._start
        if start.steps_per_epoch is None:
            return epoch * (self.length or 0)
        return start.epoch * start.steps_per_epoch

    def is_done(self, index: Any) -> Any:
        """Returns whether a batch is done. index: the number of batches before it in all epochs."""
        return index < self.batches_before(self._start.epoch) + self._start.step

    def begin_epoch(self, epoch: int) -> None:
        """Prepares an epoch. It is called before Keras begins to read the epoch."""

    def state(self) -> Any:
        """Returns JSON values for the checkpoint; None if the number of steps is enough."""


def make_data(
    start: Start, x: Any, y: Any, sample_weight: Any, batch_size: Any, shuffle: Any, *,
    done: Callable[[], int] = lambda: 0, saved: Any = None,
) -> Data:
    """Makes data for `fit` that begin at a Start.

    Args:
        start: the epoch, step and seed at which the data begin.
        x, y, sample_weight, batch_size, shuffle: the arguments of `keras.Model.fit`.
        done: returns the number of steps so far.
        saved: the JSON values from which data with a state resume, or None.

    Raises:
        ValueError: the order of the data is not known, or their state cannot be saved.
    """
    if isinstance(x, tf.data.Dataset):
        return Passes(x, start)
    if isinstance(x, types.GeneratorType):
        return Stream(x, start)
    if are_arrays(x):
        return Arrays((x, y, sample_weight), batch_size, shuffle, start)
    if _has_index(x):
        return Indexed(x, shuffle, start)
    if has_state(x):
        if start.steps_per_epoch is None:
            raise ValueError(
                f"x ({type(x).__name__}) has a state and is read without an end: "
                "give steps_per_epoch, such as the number of batches in the data."
            )
        return Stateful(x, start, done, saved)
    raise ValueError(
        f"x ({type(x).__name__}): towers.Resume cannot find its position again. Pass arrays, a "
        "PyDataset or another source of batches by index, a tf.data.Dataset, a generator, or an "
        "iterable with get_state() and set_state(value)."
    )


def are_arrays(x: Any) -> bool:
    """Returns whether x is an array or a structure of arrays."""
    leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    return bool(leaves) and all(
        hasattr(leaf, "__array__") or is_composite(leaf) or is_scipy(leaf) for leaf in leaves
    )


def split_arrays(parts: Any, share: float) -> tuple[Any, Any]:
    """Splits arrays like Keras' `validation_split`: the last `share` of the rows is for validation.

    Raises:
        ValueError: one of the two parts would be empty.
    """
    parts = _tensors(parts)
    count = _num_rows(parts)
    at = int(np.floor(count * (1.0 - share)))
    if not 0 < at < count:
        raise ValueError(f"validation_split ({share}) leaves one part of {count} examples empty.")
    bounds = ([0], [at]), ([at], [count])
    first, last = (map_tensors(partial(take_rows, begin=b, end=e), parts) for b, e in bounds)
    return first, last


class Arrays(Data):
    """Makes batches of arrays in memory, in the order that train.py has for this seed.

    Batches that are done have no rows.
    """

    def __init__(self, parts: Any, batch_size: Any, shuffle: Any, start: Start) -> None:
        super().__init__(start)
        if shuffle not in (True, False):
            raise ValueError(f"shuffle ({shuffle!r}) must be True or False with towers.Resume.")
        self._parts = _tensors(parts)
        self._count, steps = _num_rows(self._parts), start.steps_per_epoch
        batch_size = batch_size or (num_steps(self._count, steps) if steps else 32)
        self._batch_size, self._shuffle = int(batch_size), bool(shuffle)
        self.length = self.num_batches = num_steps(self._count, self._batch_size)
        self.identity = {
            "batch_size": self._batch_size, "shuffle": self._shuffle,
            "data": sha256(InMemory(self._parts).identity()),
        }
        with tf.device("/cpu:0"):
            self._before = tf.Variable(self.batches_before(start.epoch), dtype=tf.int64)
        indices = tf.data.Dataset.range(_ENDLESS if steps else self.length)
        self.x = prepare_ahead(indices.map(self._batch))
        self.spec = self.x.element_spec

    def begin_epoch(self, epoch: int) -> None:
        self._before.assign(self.batches_before(epoch))

    @tf.autograph.experimental.do_not_convert  # AutoGraph would take 0.1 s
    def _batch(self, index: tf.Tensor) -> Any:
        total = self._before + index
        epoch, step = total // self.length, total % self.length
        begin = step * self._batch_size
        end = tf.minimum(begin + self._batch_size, self._count)
        rows = tf.range(begin, end)
        if self._shuffle:
            rows = shuffled(rows, self._start.seed, epoch, self._count)
        rows = rows[: tf.where(self.is_done(total), tf.constant(0, tf.int64), end - begin)]
        x, y, sample_weight = map_tensors(lambda part: gather_rows(part, rows), self._parts)
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)


class Indexed(Data, keras.utils.PyDataset):
    """Takes batches by index from a PyDataset or a similar source.

    Batches that are done have no rows. For epochs that are done, `on_epoch_begin` and
    `on_epoch_end` of the source run again, because they may shuffle. If steps_per_epoch is
    not the length of the source, they never run: batches are read before an epoch begins.
    """

    def __init__(self, source: Any, shuffle: Any, start: Start) -> None:
        settings = ("workers", "use_multiprocessing", "max_queue_size")
        keras.utils.PyDataset.__init__(
            self, **{k: getattr(source, k) for k in settings if hasattr(source, k)}
        )
        self.length = source.num_batches if hasattr(source, "num_batches") else len(source)
        if start.steps_per_epoch == self.length:
            start = replace(start, steps_per_epoch=None)
        self._source, self._start = source, start
        self._shuffle = bool(shuffle) and self.length is not None
        self._before, self._is_replayed = 0, False
        first = source[0]
        self._empty = map_tensors(
            lambda v: take_rows(v, [0], [0]) if is_composite(v) else np.asarray(v)[:0], first
        )
        self.x, self.spec = self, batch_specs(map_tensors(_array, first))
        self.identity = {"shuffle": self._shuffle, "data": f"{self.length} {self.spec}"}

    @property
    def num_batches(self) -> int | None:  # type: ignore[override]
        """Returns the number of batches; None with steps_per_epoch or without an end."""
        return None if self._start.steps_per_epoch else self.length

    def begin_epoch(self, epoch: int) -> None:
        if not self._is_replayed:
            for _ in range(self._start.first, epoch):
                self.on_epoch_begin()
                self.on_epoch_end()
            self._is_replayed = True
        self._before = self.batches_before(epoch)

    def __getitem__(self, index: int) -> Any:
        total = self._before + index
        if self.is_done(total):
            return self._empty
        if self.length is None:
            return self._source[total]
        epoch, step = divmod(total, self.length)
        if self._shuffle:
            order = np.random.default_rng([self._start.seed, epoch]).permutation(self.length)
            step = int(order[step])
        return self._source[step]

    def on_epoch_begin(self) -> None:
        self._tell("on_epoch_begin")

    def on_epoch_end(self) -> None:
        self._tell("on_epoch_end")

    def _tell(self, name: str) -> None:
        if self._start.steps_per_epoch is None and hasattr(self._source, name):
            getattr(self._source, name)()


class Passes(Data):
    """Reads a tf.data.Dataset once per epoch, or without an end if steps_per_epoch is given.

    `shuffle` draws a seed at the beginning of each pass. So each epoch that is done is begun again,
    to draw its seed.
    """

    def __init__(self, dataset: tf.data.Dataset, start: Start) -> None:
        super().__init__(start)
        count, epochs_done = int(dataset.cardinality()), start.epoch - start.first
        self.num_batches = None if count < 0 else count
        self.spec = dataset.element_spec
        self.identity = {"data": f"{count} {self.spec}"}
        self._unread = 0
        if start.steps_per_epoch:
            self.skipped, self.x = epochs_done * start.steps_per_epoch, dataset.repeat()
            return
        # Inside `flat_map`, the dataset begins with the first batch that is read. Otherwise, each
        # iterator would begin it, and Keras makes iterators that it never reads.
        self._unread = epochs_done
        self.x = tf.data.Dataset.range(1).flat_map(lambda _: dataset)
        self.x = self.x.with_options(dataset.options())
        if count >= 0:
            self.x = self.x.apply(tf.data.experimental.assert_cardinality(count))

    def begin_epoch(self, epoch: int) -> None:
        for _ in range(self._unread):
            next(iter(self.x), None)
        self._unread = 0


class Stream(Data):
    """Reads a generator. Batches that are done are read again."""

    def __init__(self, generator: Iterator[Any], start: Start) -> None:
        super().__init__(start)
        self.skipped = (start.epoch - start.first) * (start.steps_per_epoch or 0)
        self._begin(generator)

    def _begin(self, batches: Iterator[Any], num_passed: int = 0) -> None:
        """Sets x and spec. Repeats the first batch `num_passed` times for steps that are done."""
        first = next(batches, None)
        if first is None:
            raise ValueError("x is a generator that gives no batch.")
        self.x = (b for b in itertools.chain(itertools.repeat(first, num_passed + 1), batches))
        self.spec = batch_specs(map_tensors(_array, first))
        self.identity = {"data": str(self.spec)}


class Stateful(Stream):
    """Reads an iterable that has a state, and resumes from its state."""

    def __init__(
        self, source: Any, start: Start, done: Callable[[], int], saved: Any = None
    ) -> None:
        Data.__init__(self, start)
        self._row, self._done = Repeated(source, "x", done(), saved), done
        self._begin(self._batches(), start.step)
        self.identity = {"data": f"{type(source).__name__} {self.spec}"}

    def _batches(self) -> Iterator[Any]:
        """Yields each batch after its state is noted. A thread may read ahead of the steps."""
        for batch in self._row:
            self._row.note(since=self._done())
            yield keras.tree.lists_to_tuples(batch)

    def state(self) -> Any:
        return self._row.saved(self._done())


def _array(value: Any) -> Any:
    """Converts a part of a batch to an array; returns a ragged or sparse tensor unchanged."""
    return value if is_composite(value) else np.asarray(value)


def _has_index(x: Any) -> bool:
    if isinstance(x, keras.utils.PyDataset):
        return True
    is_structure = isinstance(x, (list, tuple, dict, str, bytes))
    return not is_structure and hasattr(x, "__len__") and hasattr(x, "__getitem__")


def _tensors(parts: Any) -> Any:
    """Returns (x, y, sample_weight) as tensors on the CPU. Floats get Keras' floatx."""
    x, y, weight = keras.tree.lists_to_tuples(parts)
    if keras.tree.is_nested(y) and weight is not None and not keras.tree.is_nested(weight):
        weight = keras.tree.map_structure(lambda _: parts[2], y)
    with tf.device("/cpu:0"):
        return map_tensors(_tensor, (x, y, weight))


def _tensor(array: Any) -> tf.Tensor:
    if hasattr(array, "to_numpy"):  # pandas; Keras turns a series into a column
        array = array.to_numpy()[..., None] if len(array.shape) == 1 else array.to_numpy()
    is_known = tf.is_tensor(array) or is_scipy(array)
    tensor = as_tensor(array if is_known else np.asarray(array))
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.reorder(tensor)
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor


def _num_rows(parts: Any) -> int:
    counts = {int(part.shape[0]) for part in tf.nest.flatten(parts) if part is not None}
    if len(counts) != 1:
        raise ValueError(f"x, y and sample_weight have different lengths: {sorted(counts)}.")
    return counts.pop()
