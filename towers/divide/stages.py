"""Runs the stages of the towers and the meetings between them, within the caller's tf.function."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from towers.divide.compiling import indices_are_valid, is_compiled_loop
from towers.divide.context import Context, Place, open_shape, reads
from towers.divide.facts import EACH, ONCE, OWN, PART, WHOLE, Need, Op, Value
from towers.machine.tensorflow_internals import KEEP_WHOLE
from towers.step.averaging import Tree, add_tree, partial_sums
from towers.step.structures import SPLIT

_LARGE = 4096  # elements
FullShards: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]


class Run:
    """Holds the values of one call: whole values, and each tower's values."""

    def __init__(
        self, given: dict[Value, Any], batch: Value | None, devices: Sequence[str], home: str,
        adds_on_devices: bool, takes_first: bool, full_batch: FullShards | None,
    ) -> None:  # fmt: skip
        """
        batch: one of the values given, which has the rows of the batch. takes_first: whether a
            statistic that each tower has is tower 0's if it is read whole, instead of the average.
        full_batch: tells which towers' loops run compiled, given their numbers of rows; None: none.
        """
        self._takes_first = takes_first
        self.devices, self.home, self._adds_on_devices = devices, home, adds_on_devices
        num_towers = len(devices)
        total = tf.shape(given[batch])[0] if batch is not None else tf.constant(1)
        tower = tf.range(num_towers)
        counts = total // num_towers + tf.cast(tower < total % num_towers, tf.int32)
        starts = tf.minimum(tf.cumsum(counts, exclusive=True), total - 1)
        # A tower without rows computes on the last row of the batch, because some kernels fail
        # without one. `_if_rows` and `real_parts` drop what it computes.
        sizes = tf.unstack(counts, num_towers)
        self.compiled = None if full_batch is None else full_batch(sizes)  # T bools
        self.places = [
            Place(tf.maximum(count, 1), start, total, count > 0)
            for count, start in zip(sizes, tf.unstack(starts, num_towers))
        ]
        self.whole = Context(Place(total, tf.constant(0), total, tf.constant(True)), self._meet)
        self.whole.values.update(given)
        self._given, self.total, self.counts = given, total, counts
        self.towers: list[dict[Value, Any]] = [{} for _ in self.places]
        self._met: dict[Value, Any] = {}
        self._real_parts: dict[Value, list[Any]] = {}
        self._shards: dict[tuple[Value, int], list[Any]] = {}

    def _meet(self, value: Value, need: Need) -> Any:
        """Returns what the towers have as one value, on the parameter device."""
        if need == OWN or value.fact == ONCE:  # an open size, or a value that towers have alike
            return self._given[value] if value in self._given else self.towers[0][value]
        if value in self._given:
            return self._given[value]
        if value not in self._met:
            with tf.device(self.home):
                if value.fact == EACH:
                    self._met[value] = self._average(value)
                elif value.fact == PART:
                    self._met[value] = add_tree(self.tree(value))[0]
                else:
                    self._met[value] = tf.concat(self.real_parts(value), value.fact.axis)
        return self._met[value]

    def _average(self, value: Value) -> Any:
        """Returns the average of what the towers have, weighted by rows, or tower 0's."""
        own = self.values_for(value, OWN)
        if self._takes_first or not value.dtype.is_floating:
            return own[0]
        shares = [tf.cast(place.count / self.total, value.dtype) for place in self.places]
        return tf.add_n([
            tf.where(place.has_rows, each * share, tf.zeros_like(each))
            for each, share, place in zip(own, shares, self.places, strict=True)
        ])

    def tree(self, value: Value) -> Tree:
        """Returns the additions of a value's parts that remain for the parameter device."""
        if value in self._met:
            return [self._met[value]]
        return partial_sums(
            [[part] for part in self.real_parts(value)],
            self.devices,
            add_on_devices=self._adds_on_devices,
            parameter_device=self.home,
        )

    def real_parts(self, value: Value) -> list[Any]:
        """Returns what each tower adds to a value: no rows, if the tower has none."""
        parts = self.values_for(value, OWN)
        if value.fact == PART:
            return parts
        if value not in self._real_parts:
            self._real_parts[value] = parts[:1]  # it has a row of every batch
            for own, place, device in zip(parts[1:], self.places[1:], self.devices[1:]):
                with tf.device(device):
                    shape = tf.shape(own)
                    is_kept = tf.one_hot(value.fact.axis, tf.size(shape), place.has_rows, True)
                    kept = tf.slice(own, tf.zeros_like(shape), tf.where(is_kept, shape, 0))
                    self._real_parts[value].append(kept)
        return self._real_parts[value]

    def values_for(self, value: Value, need: Need) -> list[Any]:
        """Returns, for each tower, a value as a stage reads it."""
        if need == OWN and value in self.towers[0]:
            return [tower[value] for tower in self.towers]
        if need in (OWN, WHOLE) and value.fact == ONCE or need == WHOLE:
            return [self.whole.read(value, WHOLE)] * len(self.towers)
        axis = value.fact.axis if need == OWN else need.axis
        if (value, axis) not in self._shards:
            with tf.name_scope(f"{SPLIT}/"), tf.device(self.home):
                self._shards[value, axis] = self._cut(self.whole.read(value, WHOLE), axis)
        return self._shards[value, axis]

    def _cut(self, whole: tf.Tensor, axis: int) -> list[tf.Tensor]:
        """Returns each tower's rows along an axis of a value of the batch."""
        shape = tf.shape(whole)
        each = shape[axis] // self.total
        at_axis = tf.one_hot(axis, tf.size(shape), True, False)
        with tf.control_dependencies([
            tf.debugging.assert_equal(each * self.total, shape[axis], "rows of the batch")
        ]):  # fmt: skip
            shards = []
            for place in self.places:
                begin = tf.where(at_axis, each * place.start, 0)
                shards.append(tf.slice(whole, begin, tf.where(at_axis, each * place.count, shape)))
                shards[-1].set_shape([None if a == axis else n for a, n in enumerate(whole.shape)])
        return shards


class Stage:
    """Computes a tower's part between two meetings: the same operations on each device."""

    def __init__(self, ops: Sequence[Op], read_after: Collection[Value]) -> None:
        """read_after: the values that operations of other phases read."""
        self._ops = ops
        own = {value for op in ops for value in op.outputs}
        found = (pair for op in ops for pair in reads(op) if pair[0] not in own)
        self._inputs = list(dict.fromkeys(found))
        self._outputs = [value for op in ops for value in op.outputs if value in read_after]
        ends = [*(value for value, _ in self._inputs), *self._outputs]
        self._is_loop = is_compiled_loop(ops, ends)
        self._traced: dict[bool, Callable] = {}

    def call(self, run: Run) -> None:
        """Computes the results of each tower, on its device."""
        given = [run.values_for(value, need) for value, need in self._inputs]
        plain = self._function(False)
        flags = run.compiled if self._is_loop else None
        for t, (place, device) in enumerate(zip(run.places, run.devices, strict=True)):
            own = [values[t] for values in given]
            with tf.name_scope(f"tower_{t}"), tf.device(device):
                if flags is None:
                    results, _ = plain(place, own)
                else:
                    results = _chosen(flags[t], self._function(True), plain, place, own)
            run.towers[t].update(zip(self._outputs, results, strict=True))

    def _compute(self, is_compiled: bool, place: Place, given: list[Any]) -> tuple[list[Any], Any]:
        """Emits the operations of one tower; returns the values of `_outputs`.

        Also returns whether all indices are valid, if XLA compiles the function.
        """
        found = dict(zip(self._inputs, given, strict=True))
        context = Context(place, lambda value, need: found[value, need])
        context.run(self._ops)
        results = [context.values[value] for value in self._outputs]
        is_part = [value.fact == PART and value.dtype != tf.variant for value in self._outputs]
        real = iter(_if_rows(place, [part for part, told in zip(results, is_part) if told]))
        results = [next(real) if told else value for value, told in zip(results, is_part)]
        return results, indices_are_valid(self._ops, context.read) if is_compiled else ()

    def _function(self, is_compiled: bool) -> Callable:
        """Returns the function of a tower, traced once, and once for XLA."""
        if is_compiled not in self._traced:
            scalar, flag = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.bool)
            specs = [_spec(value, need) for value, need in self._inputs]
            options: dict[str, Any] = {"jit_compile": True} if is_compiled else {
                "experimental_attributes": KEEP_WHOLE
            }  # fmt: skip
            with tf.init_scope(), tf.device(None):
                self._traced[is_compiled] = tf.function(
                    functools.partial(self._compute, is_compiled), autograph=False, **options
                ).get_concrete_function(Place(scalar, scalar, scalar, flag), specs)
        return self._traced[is_compiled]


def _chosen(
    is_compiled: Any, compiled: Callable, plain: Callable, place: Place, given: list[Any]
) -> list[Any]:
    """Returns the results of the compiled function for full batches with valid indices.

    The other one raises the error of an index that is out of range.
    """

    def fast() -> list[Any]:
        results, is_valid = compiled(place, given)
        return tf.cond(is_valid, lambda: results, lambda: plain(place, given)[0])

    return tf.nest.flatten(tf.cond(is_compiled, fast, lambda: plain(place, given)[0]))


def _if_rows(place: Place, parts: list[Any]) -> list[Any]:
    """Returns parts of sums; zeros if the tower has no rows.

    A condition copies nothing, and a selection takes less time for small tensors.
    """
    large = {
        i: part
        for i, part in enumerate(parts)
        if (part.shape.num_elements() or _LARGE) >= _LARGE
    }

    def zeros() -> dict[int, Any]:
        return {i: tf.zeros_like(part) for i, part in large.items()}

    kept = tf.cond(place.has_rows, lambda: large, zeros) if large else {}
    return [
        kept[i] if i in kept else tf.where(place.has_rows, part, tf.zeros_like(part))
        for i, part in enumerate(parts)
    ]


def _spec(value: Value, need: Need) -> tf.TensorSpec:
    """Returns the spec of what a stage reads: the number of rows is open."""
    shape = value.shape
    if need == OWN:
        shape = open_shape(value)
    elif need.kind == "rows" and shape.rank is not None:
        shape = tf.TensorShape([None if a == need.axis else n for a, n in enumerate(shape)])
    return tf.TensorSpec(shape, value.dtype)
