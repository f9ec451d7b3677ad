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
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.resume.source import InMemory, as_written, num_steps, prepare_ahead, sha256, shuffled
from towers.resume.stateful import Repeated, has_state
from towers.step.structures import (
    as_tensor, batch_specs, gather_rows, is_composite, is_scipy, map_tensors, take_rows,
)


class Start(NamedTuple):
    """Says at which epoch and step the data begin, and the seed of their order."""

    seed: int
    first: int = 0  # the initial epoch of the first process
    epoch: int = 0  # the epoch that is under way
    step: int = 0  # the number of steps of `epoch` that are done
    steps_per_epoch: int | None = None  # `fit`'s, rounded up to whole executions; None: all data

    def batches_before(self, epoch: int, length: int | None) -> int:
        """Returns the number of batches before an epoch, if a pass over the data has `length`.

        With steps_per_epoch, counts to the start: Keras makes one iterator, which does not end.
        """
        steps = self.steps_per_epoch
        return epoch * (length or 0) if steps is None else self.epoch * steps


@dataclass(frozen=True)
class Data:
    """Data that begin at a Start."""

    x: Any  # the argument for Keras' fit
    spec: Any  # the spec of one batch
    identity: dict[str, Any]  # values that must not differ in a resumed fit
    num_batches: int | None = None  # of an epoch; None if not known, or with steps_per_epoch
    skipped: int = 0  # how many batches of x to read before the first epoch
    begin_epoch: Callable[[int], Any] = lambda epoch: None  # called before Keras reads an epoch
    state: Callable[[], Any] = lambda: None  # gives JSON values; None if steps are enough


def make_data(
    start: Start, x: Any, y: Any, sample_weight: Any, batch_size: Any, shuffle: Any, *,
    done: Callable[[], int] = lambda: 0, saved: Any = None,
) -> Data:
    """Makes data of the arguments of `fit`; raises ValueError if their order is not known.

    done: returns the number of steps so far. saved: the result of `Data.state` to resume from.
    """
    if isinstance(x, tf.data.Dataset):
        return _passes(x, start)
    if isinstance(x, types.GeneratorType):
        read_again = (start.epoch - start.first) * (start.steps_per_epoch or 0)
        return replace(_stream(x), skipped=read_again)
    if are_arrays(x):
        return _arrays((x, y, sample_weight), batch_size, shuffle, start)
    has_index = hasattr(x, "__len__") and hasattr(x, "__getitem__")
    if isinstance(x, keras.utils.PyDataset) or (
        has_index and not isinstance(x, list | tuple | dict | str | bytes)
    ):
        return _Indexed(x, shuffle, start).data
    if has_state(x):
        if start.steps_per_epoch is None:
            raise ValueError(
                f"x ({type(x).__name__}) has a state and is read without an end: "
                "give steps_per_epoch, such as the number of batches in the data."
            )
        return _stateful(x, start, done, saved)
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
    """Splits arrays as `validation_split` does: the last `share` of the rows is for validation."""
    parts = _tensors(parts)
    count = _num_rows(parts)
    at = int(np.floor(count * (1.0 - share)))
    if not 0 < at < count:
        raise ValueError(f"validation_split ({share}) leaves one part of {count} examples empty.")
    first = map_tensors(partial(take_rows, begin=[0], end=[at]), parts)
    return first, map_tensors(partial(take_rows, begin=[at], end=[count]), parts)


def _arrays(parts: Any, batch_size: Any, shuffle: Any, start: Start) -> Data:
    """Makes batches of arrays, in the order of train.py; batches that are done have no rows."""
    if shuffle not in (True, False):
        raise ValueError(f"shuffle ({shuffle!r}) must be True or False with towers.Resume.")
    parts, steps = _tensors(parts), start.steps_per_epoch
    count = _num_rows(parts)
    size = int(batch_size or (num_steps(count, steps) if steps else 32))
    length = num_steps(count, size)
    num_done = start.batches_before(start.epoch, length) + start.step
    with tf.device("/cpu:0"):
        before = tf.Variable(start.batches_before(start.epoch, length), dtype=tf.int64)

    @as_written
    def batch(index: tf.Tensor) -> Any:
        total = before + index
        epoch, step = total // length, total % length
        begin = step * size
        end = tf.minimum(begin + size, count)
        rows = tf.range(begin, end)
        if shuffle:
            rows = shuffled(rows, start.seed, epoch, count)
        rows = rows[: tf.where(total < num_done, tf.constant(0, tf.int64), end - begin)]
        return keras.utils.pack_x_y_sample_weight(
            *map_tensors(lambda part: gather_rows(part, rows), parts)
        )

    x = prepare_ahead(tf.data.Dataset.range(tf.int64.max if steps else length).map(batch))
    digest = sha256(InMemory(parts).identity())
    return Data(
        x, x.element_spec, {"batch_size": size, "shuffle": bool(shuffle), "data": digest},
        None if steps else length,
        begin_epoch=lambda epoch: before.assign(start.batches_before(epoch, length)),
    )


class _Indexed(keras.utils.PyDataset):
    """Takes batches by index from a PyDataset or a similar source.

    Batches that are done have no rows. For epochs that are done, `on_epoch_begin` and
    `on_epoch_end` of the source run again, because they may shuffle. If steps_per_epoch is
    not the length of the source, they never run: batches are read before an epoch begins.
    """

    def __init__(self, source: Any, shuffle: Any, start: Start) -> None:
        settings = ("workers", "use_multiprocessing", "max_queue_size")
        super().__init__(**{k: getattr(source, k) for k in settings if hasattr(source, k)})
        self._length = source.num_batches if hasattr(source, "num_batches") else len(source)
        if start.steps_per_epoch == self._length:
            start = start._replace(steps_per_epoch=None)
        self._source, self._start, self._before = source, start, 0
        self._shuffle = bool(shuffle) and self._length is not None
        self._num_done = start.batches_before(start.epoch, self._length) + start.step
        first = source[0]
        self._empty = map_tensors(
            lambda v: take_rows(v, [0], [0]) if is_composite(v) else np.asarray(v)[:0], first
        )
        spec = batch_specs(map_tensors(_array, first))
        identity = {"shuffle": self._shuffle, "data": f"{self._length} {spec}"}
        self.data = Data(self, spec, identity, self.num_batches, begin_epoch=self._begin_epoch)

    @property
    def num_batches(self) -> int | None:
        """Returns the number of batches; None with steps_per_epoch or without an end."""
        return None if self._start.steps_per_epoch else self._length

    def _begin_epoch(self, epoch: int) -> None:
        if epoch == self._start.epoch:
            for _ in range(self._start.first, epoch):
                self.on_epoch_begin()
                self.on_epoch_end()
        self._before = self._start.batches_before(epoch, self._length)

    def __getitem__(self, index: int) -> Any:
        total = self._before + index
        if total < self._num_done:
            return self._empty
        if self._length is None:
            return self._source[total]
        epoch, step = divmod(total, self._length)
        if self._shuffle:
            order = np.random.default_rng([self._start.seed, epoch]).permutation(self._length)
            step = int(order[step])
        return self._source[step]

    def _tell(self, name: str) -> None:
        if self._start.steps_per_epoch is None and hasattr(self._source, name):
            getattr(self._source, name)()

    on_epoch_begin = partialmethod(_tell, "on_epoch_begin")
    on_epoch_end = partialmethod(_tell, "on_epoch_end")


def _passes(dataset: tf.data.Dataset, start: Start) -> Data:
    """Reads a tf.data.Dataset once per epoch, or without an end if steps_per_epoch is given.

    `shuffle` draws a seed at the beginning of each pass. So each epoch that is done is begun again,
    to draw its seed.
    """
    count, epochs_done = int(dataset.cardinality()), start.epoch - start.first
    spec = dataset.element_spec
    identity = {"data": f"{count} {spec}"}
    if start.steps_per_epoch:
        return Data(dataset.repeat(), spec, identity, skipped=epochs_done * start.steps_per_epoch)
    # Inside `flat_map`, the dataset begins with the first batch that is read. Otherwise, each
    # iterator would begin it, and Keras makes iterators that it never reads.
    x = tf.data.Dataset.range(1).flat_map(lambda _: dataset).with_options(dataset.options())
    if count >= 0:
        x = x.apply(tf.data.experimental.assert_cardinality(count))

    def begin_epoch(epoch: int) -> None:
        for _ in range(epochs_done if epoch == start.epoch else 0):
            next(iter(x), None)

    return Data(x, spec, identity, None if count < 0 else count, begin_epoch=begin_epoch)


def _stream(batches: Iterator[Any], num_passed: int = 0) -> Data:
    """Reads a generator. Its first batch comes `num_passed` times more, for steps that are done."""
    first = next(batches, None)
    if first is None:
        raise ValueError("x is a generator that gives no batch.")
    spec = batch_specs(map_tensors(_array, first))
    x = (b for b in itertools.chain(itertools.repeat(first, num_passed + 1), batches))
    return Data(x, spec, {"data": str(spec)})


def _stateful(source: Any, start: Start, done: Callable[[], int], saved: Any) -> Data:
    """Reads an iterable that has a state, and resumes from its state."""
    row = Repeated(source, "x", done(), saved)

    def batches() -> Iterator[Any]:
        for batch in row:  # a thread may read ahead of the steps
            row.note(since=done())
            yield keras.tree.lists_to_tuples(batch)

    data = _stream(batches(), start.step)
    identity = {"data": f"{type(source).__name__} {data.spec}"}
    return replace(data, identity=identity, state=lambda: row.saved(done()))


def _array(value: Any) -> Any:
    """Converts a part of a batch to an array; returns a ragged or sparse tensor unchanged."""
    return value if is_composite(value) else np.asarray(value)


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
    tensor = as_tensor(array if tf.is_tensor(array) or is_scipy(array) else np.asarray(array))
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.reorder(tensor)
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor


def _num_rows(parts: Any) -> int:
    counts = {int(part.shape[0]) for part in tf.nest.flatten(parts) if part is not None}
    if len(counts) != 1:
        raise ValueError(f"x, y and sample_weight have different lengths: {sorted(counts)}.")
    return counts.pop()
