"""Prepares the data of `fit` so that a resumed fit reads the rest of them.

| data                             | order of an epoch         | batches that are done       |
| -------------------------------- | ------------------------- | --------------------------- |
| arrays                           | Keras' own, from its seed | are read again in one epoch |
| a PyDataset, batches by index    | Keras' own, from `random` | are not read                |
| a tf.data.Dataset                | set by the dataset        | are read again in one pass  |
| a generator                      | set by the generator      | are read again, all of them |
| an iterable that has a state     | set by the iterable       | are not read                |

Keras' own data adapters read all of them, as in a fit without towers.Resume.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from towers.machine.data_internals import are_arrays, data_adapter
from towers.machine.replaced import replaced
from towers.machine.user_lines import warn_user
from towers.resume.dataset_draws import examine
from towers.resume.epoch import Epoch, content_of, sha256
from towers.resume.random_state import random_state, set_random_state
from towers.resume.replay import Replay
from towers.resume.stateful import Json, Repeated, has_state
from towers.step.structures import (
    BatchTensor,
    Structure,
    as_tensor,
    is_composite,
    is_scipy,
    map_tensors,
    take_rows,
)

Arguments: TypeAlias = dict[str, Any]  # all arguments of `keras.Model.fit`, by name
NOTHING, THIS_PASS, ALL = "nothing", "this pass", "all passes"
_SIGNATURE_READS = 2  # batches that Keras reads to find their types and shapes


@dataclass
class Data:
    """Data of a fit, with what a resumed fit has to know about them."""

    x: object  # the argument for Keras' fit
    spec: Structure = None  # the spec of one batch
    shuffle: bool | str = False  # Keras' argument
    identity: dict[str, Json] = field(default_factory=dict)  # must not differ in a resumed fit
    num_batches: int | None = None  # of an epoch; None if not known, or with steps_per_epoch
    ends: bool = True  # whether Keras' loop ends without reading
    reads: str = THIS_PASS  # what a resumed fit reads again: NOTHING, THIS_PASS or ALL
    is_plain: bool = False  # whether reading them changes nothing for a later iterator
    is_direct: bool = False  # whether a resumed fit may leave out the epochs that are done
    begin_pass: Callable[[int], None] = lambda number: None  # called with an iterator's number
    state: Callable[[], Mapping[str, Json]] = dict  # gives the values that `saved` brings back


def train_data(
    arguments: Arguments,
    replay: Replay,
    seed: int,
    *,
    done: Callable[[], int] = lambda: 0,
    saved: Mapping[str, Any] | None = None,
) -> Data:
    """Prepares the data of `fit`; raises ValueError if their order cannot be repeated.

    arguments: the arguments of `fit` by name, after its `validation_split`.
    seed: gives the order of arrays in a script that sets no seed.
    done: returns the number of steps so far. saved: the results of `Data.state` to resume from.
    """
    order = _ArrayOrder(seed, None if saved is None else saved.get("order"))
    data = _data_of(arguments, replay, order, done, saved or {})
    names = ("y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight")
    adapter = data_adapter(
        x=data.x, shuffle=data.shuffle, **{name: arguments[name] for name in names}
    )
    with replaced(tf.random, "shuffle", order.shuffle):
        dataset = adapter.get_tf_dataset()
    adapter.get_tf_dataset = lambda: dataset  # Keras asks for it in `fit`
    data.x, data.spec = adapter, dataset.element_spec
    # With steps_per_epoch, an iterator continues from epoch to epoch.
    is_one_pass = arguments["steps_per_epoch"] is not None
    data.is_direct = data.is_plain and (not is_one_pass or data.reads == NOTHING)
    data.num_batches = None if is_one_pass else adapter.num_batches
    if "data" in data.identity:
        data.identity["batch_size"] = adapter.batch_size
    else:
        kind = type(arguments["x"]).__name__
        data.identity["data"] = f"{kind} {adapter.num_batches} {data.spec}"
    return data


def _data_of(
    arguments: Arguments,
    replay: Replay,
    order: "_ArrayOrder",
    done: Callable[[], int],
    saved: Mapping[str, Any],
) -> Data:
    """Returns what follows from the kind of `x`; its `x` is for Keras' data adapter."""
    x, steps, shuffle = (arguments[name] for name in ("x", "steps_per_epoch", "shuffle"))
    parts = [x, arguments["y"], arguments["sample_weight"]]
    if isinstance(x, tf.data.Dataset):
        return _dataset(x, replay, shuffle)
    if isinstance(x, types.GeneratorType):
        return Data(x, shuffle=shuffle, reads=ALL)
    if x is not None and are_arrays(*parts):
        return Data(
            x,
            shuffle=shuffle,
            identity={"shuffle": shuffle, "data": _digest(parts)},
            is_plain=True,
            begin_pass=order.begin_pass,
            state=order.state,
        )
    if _has_index(x):
        replay.keeps_random = True
        shuffle = bool(shuffle) and not _is_grain(x)  # which Keras does not shuffle
        source = _Indexed(x, replay, shuffle, steps is None, saved.get("next"))
        return Data(
            source,
            shuffle=shuffle,
            identity={"shuffle": shuffle},
            reads=source.reads,
            is_plain=not has_epochs(x),
            begin_pass=source.begin_pass,
            state=source.state,
        )
    if has_state(x):
        return _stateful(x, steps, done, saved.get("iterator"))
    raise ValueError(
        f"x ({type(x).__name__}): towers.Resume cannot find its position again. Pass arrays, a "
        "PyDataset or another source of batches by index, a tf.data.Dataset, a generator, or an "
        "iterable with get_state() and set_state(value)."
    )


def validation_data(arguments: Arguments, replay: Replay) -> Data:
    """Prepares `validation_data`, which may go on from one validation to the next."""
    given = arguments["validation_data"]
    x, *others = keras.utils.unpack_x_y_sample_weight(given)
    steps = arguments["validation_steps"]
    data = Data(given, reads=NOTHING, is_plain=True)
    is_known = given is None or are_arrays(x, *others) or isinstance(x, keras.utils.PyDataset)
    is_read_ahead = isinstance(x, types.GeneratorType)
    if isinstance(x, tf.data.Dataset):
        draws, length = examine(x, "validation_data"), int(x.cardinality())
        data.reads, data.is_plain = NOTHING if draws.is_known else ALL, draws.is_plain
        is_known = length >= 0
        is_left = steps is not None and not 0 <= length <= steps
        is_read_ahead = is_left and not (draws.is_known and not draws.variables)
    elif isinstance(x, keras.utils.PyDataset):
        data.x = source = _Indexed(x, replay, False, False)
        data.reads = ALL if source.reads == ALL else NOTHING
        data.is_plain = not has_epochs(x)
    if is_read_ahead:
        warn_user(
            f"validation_data ({type(x).__name__}): TensorFlow reads it ahead of the validation, "
            "by another number of batches in each run, so that a resumed fit may validate on "
            "others. Leave validation_steps out, or pass a keras.utils.PyDataset, or a "
            "tf.data.Dataset that repeats before it shuffles."
        )
    data.is_direct = data.is_plain
    data.ends = is_known or steps is not None
    return data


def _has_index(x: object) -> bool:
    has_index = hasattr(x, "__len__") and hasattr(x, "__getitem__")
    is_plain = isinstance(x, list | tuple | dict | str | bytes)
    return isinstance(x, keras.utils.PyDataset) or has_index and not is_plain


def _is_grain(x: object) -> bool:
    return type(x).__module__.split(".")[0] == "grain"


def has_epochs(source: object) -> bool:
    """Returns whether a source of batches does something between epochs, such as shuffling."""
    return any(
        getattr(type(source), name, None) is not getattr(keras.utils.PyDataset, name)
        and hasattr(source, name)
        for name in ("on_epoch_begin", "on_epoch_end")
    )


class _ArrayOrder:
    """Gives `tf.random.shuffle`, by which Keras orders arrays, seeds that can be saved.

    With a seed of the script, such as keras.utils.set_random_seed(1), the order is Keras' own.
    Without one, TensorFlow draws each order from a seed that nobody can read. So each iterator gets
    an order that follows from a seed of towers and the iterator's number.
    """

    def __init__(self, seed: int, saved: list | None = None) -> None:
        self._seed: int
        self._global_seed: int | None
        self._seed, self._global_seed = saved or (seed, None)
        self._is_saved = saved is not None
        with tf.device("/cpu:0"):
            self._pass = tf.Variable(0, dtype=tf.int64)

    def shuffle(
        self, original: Callable[[tf.Tensor], tf.Tensor]
    ) -> Callable[[tf.Tensor], tf.Tensor]:
        """Replaces `tf.random.shuffle` in the function that Keras traces."""

        def shuffled(values: tf.Tensor) -> tf.Tensor:
            graph = tf.compat.v1.get_default_graph()
            if not self._is_saved:
                self._global_seed = graph.seed
            if self._global_seed is not None:
                graph.seed = self._global_seed
                return original(values)
            first = tf.cast(values[0], tf.int64)  # Keras may shuffle each batch on its own
            # Only the low 32 bits of each number count.
            seed, count = (self._seed + self._pass * 1_000_003) % 2**31, tf.size(values, tf.int64)
            epoch = Epoch(count, seed=seed, number=first)
            return tf.gather(values, epoch.order(tf.range(count), count))

        return shuffled

    def begin_pass(self, number: int) -> None:
        self._pass.assign(number)

    def state(self) -> dict[str, Json]:
        return {"order": [self._seed, self._global_seed]}


class _Indexed(keras.utils.PyDataset):
    """Takes batches by index from a PyDataset or a similar source, for Keras.

    In a resumed fit, batches that are done have no rows, and the source is not asked for them.
    """

    def __init__(
        self,
        source: keras.utils.PyDataset,
        replay: Replay,
        shuffle: bool,
        is_epoch: bool,
        saved: dict[str, Json] | None = None,
    ) -> None:
        """
        is_epoch: whether an iterator of the data for training is an epoch.
        saved: the random state before the first batch that is not done, if batches draw from it.
        """
        settings = ("workers", "use_multiprocessing", "max_queue_size")
        super().__init__(**{k: getattr(source, k) for k in settings if hasattr(source, k)})
        self._source, self._replay, self._saved = source, replay, saved
        length = self.num_batches
        self._left_of_signature = _SIGNATURE_READS
        if length is not None:
            self._left_of_signature = min(length, _SIGNATURE_READS)
        self._empty: Structure = None
        is_parallel = self.workers > 1 or self.workers > 0 and self.use_multiprocessing
        self._is_in_turn = not is_parallel
        # Keras' threads hand on what is left of one epoch as the first batches of the next one.
        self.reads = ALL if is_parallel else THIS_PASS
        self._is_in_order = is_epoch and not shuffle  # whether an index is a step of the epoch
        self._at = 0  # the number of batches of the iterator that have been read in turn
        # By such a number: the random state that it draws from.
        self._states: dict[int, dict[str, Json] | None] = {}

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Sends only the source to another process."""
        return _itself, (self._source,)

    @property
    def num_batches(self) -> int | None:
        """Returns the number of batches; None without an end."""
        source = self._source
        if hasattr(source, "num_batches"):
            return source.num_batches
        return len(source)

    def __getitem__(self, index: int) -> Structure:
        if self._left_of_signature:
            self._left_of_signature -= 1
            batch = self._source[index]
            if self._empty is None:
                self._empty = map_tensors(_no_rows, batch)
            return batch
        at, self._at = self._at, self._at + 1
        if self._is_done(at, index):
            return self._empty
        if self._is_in_turn:
            return self._read(at, index)
        return self._source[index]

    def _is_done(self, at: int, index: int) -> bool:
        replay = self._replay
        if replay.is_closed:  # a thread reads on, and would draw from the random state
            return True
        if self._is_in_turn:
            return replay.is_before_pass or at < replay.num_done
        # Threads begin to read before Keras does, and in any order.
        return replay.is_before_epoch or self._is_in_order and index < replay.num_done

    def _read(self, at: int, index: int) -> Structure:
        """Reads a batch; keeps the random state before it if the source draws from it."""
        self._replay.wait()  # for the random state, from which the batch may draw
        if self._saved:
            set_random_state(self._saved)
            self._saved = None
        done = self._replay.now.pass_step
        states = {number: state for number, state in self._states.items() if number >= done}
        before = random_state()
        self._states = {**states, at: before}
        batch = self._source[index]
        if random_state() == before:
            self._states[at] = None
        return batch

    def begin_pass(self, number: int) -> None:
        self._at, self._states = 0, {}

    def state(self) -> dict[str, Json]:
        return {"next": self._states.get(self._replay.now.pass_step)}

    def _tell(self, name: str) -> None:
        if hasattr(self._source, name):
            self._replay.call(getattr(self._source, name))

    on_epoch_begin = partialmethod(_tell, "on_epoch_begin")
    on_epoch_end = partialmethod(_tell, "on_epoch_end")


def _itself(source: keras.utils.PyDataset) -> keras.utils.PyDataset:
    return source


def _no_rows(value: BatchTensor) -> BatchTensor | np.ndarray:
    if is_composite(value):
        return take_rows(value, [0], [0])
    return np.asarray(value)[:0]


def _dataset(dataset: tf.data.Dataset, replay: Replay, shuffle: bool | str) -> Data:
    draws = examine(dataset, "x")
    if draws.is_known:
        replay.variables = draws.variables
    return Data(
        dataset,
        shuffle=shuffle,
        identity={"seeds of its shuffles": draws.seeds},
        reads=THIS_PASS if draws.is_known else ALL,
        is_plain=draws.is_plain,
    )


def _stateful(
    source: Iterable[Structure], steps: int | None, done: Callable[[], int], saved: Json
) -> Data:
    """Reads an iterable that has a state, and resumes from its state."""
    if steps is None:
        raise ValueError(
            f"x ({type(source).__name__}) has a state and is read without an end: "
            "give steps_per_epoch, such as the number of batches in the data."
        )
    row = Repeated(source, "x", done(), saved)

    def batches() -> Iterator[Structure]:
        for batch in row:  # a thread may read ahead of the steps
            row.note(since=done())
            yield keras.tree.lists_to_tuples(batch)

    return Data(
        batches(), reads=NOTHING, is_plain=True, state=lambda: {"iterator": row.saved(done())}
    )


def _digest(parts: Structure) -> str:
    """Returns the SHA-256 of arrays."""
    leaves = [leaf for leaf in keras.tree.flatten(parts) if leaf is not None]
    return sha256(piece for leaf in leaves for piece in content_of(_tensor(leaf)))


def _tensor(array: object) -> BatchTensor:
    """Returns an array as a tensor on the CPU."""
    with tf.device("/cpu:0"):
        if hasattr(array, "to_numpy"):  # pandas
            array = array.to_numpy()
        tensor = as_tensor(array if tf.is_tensor(array) or is_scipy(array) else np.asarray(array))
        if isinstance(tensor, tf.SparseTensor):
            return tf.sparse.reorder(tensor)
        return tensor
