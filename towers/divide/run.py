"""Holds the values of one run of a divided step: whole values, and values of each tower.

    parts of a sum   T towers, W workers   -->   one tree of additions   -->   a whole value
    rows             T towers, W workers   -->   joined in order         -->   a whole value
    whole values     the parameter device  -->   sent to each device once

A worker has the values of its towers. Workers meet in the same order, because all of them have
the same phases.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from towers.divide.context import Context, Place, open_shape
from towers.divide.facts import EACH, ONCE, OWN, PART, WHOLE, Need, Tensors, Value
from towers.divide.machines import Machine
from towers.machine.devices import HOST
from towers.step.averaging import Tree, add_tree
from towers.step.sharding import bounds
from towers.step.structures import SPLIT, SUM
from towers.step.transfers import spread


class Run:
    """Holds the values of one call: whole values, and values of each of this worker's towers.

    counts: the numbers of rows of all T towers. total: their sum. ends: by device, the end of the
    last call of a tower, for devices whose towers take turns. places_of: the device on which each
    tower makes a value, for values that are made in stages.
    """

    def __init__(
        self, machine: Machine, inputs: Mapping[Value, tf.Tensor], batch: Sequence[Value],
        total: tf.Tensor, placed: Sequence[Sequence[tf.Tensor]] | None,
    ) -> None:  # fmt: skip
        """
        batch: the inputs that have the rows of the batch. total: their number. placed: for each of
            this worker's towers, its rows of them, on its device; None: the batch is split here.
        """
        self.machine, self._inputs = machine, dict(inputs)
        exchange = machine.exchange
        num_towers, local = exchange.num_towers, exchange.local_towers
        self.total = total
        starts, _, self.counts = bounds(total, num_towers)
        # A tower without rows computes on the last row of the batch, because some kernels fail
        # without one. `Stage` and `real_parts` drop what it computes.
        sizes = tf.unstack(self.counts, num_towers)
        flags = None if machine.full_batch is None else machine.full_batch(sizes)  # T bools
        self.compiled = None if flags is None else [flags[t] for t in local]
        places = [
            Place(tf.maximum(count, 1), start, self.total, count > 0)
            for count, start in zip(sizes, tf.unstack(starts, num_towers), strict=True)
        ]
        self.places = [places[t] for t in local]
        # One tensor each, because each transfer has a fixed cost.
        self.sent_places = [tf.stack([tf.cast(v, tf.int32) for v in p]) for p in self.places]
        everything = Place(self.total, tf.constant(0), self.total, tf.constant(True))
        self.whole = Context(everything, self._meet, self._agree)
        # A worker that has only its rows cannot make whole values of them.
        apart = set(batch) if exchange.has_own_rows else set()
        self.whole.values.update((v, tensor) for v, tensor in inputs.items() if v not in apart)
        self.towers: list[dict[Value, tf.Tensor]] = [{} for _ in self.places]
        self.ends: dict[str, tf.Operation] = {}
        self.places_of: dict[Value, Sequence[str]] = {}
        self._met: dict[Value, tf.Tensor] = {}
        self._trees: dict[Value, Tree] = {}
        self._real_parts: dict[Value, Tensors] = {}
        self._shards: dict[tuple[Value, int], Tensors] = {}
        self._sent: dict[str, dict[Value, tf.Tensor]] = defaultdict(dict)  # by device
        assert placed is None or len(placed) == len(local), "one shard for each tower"
        for i, value in enumerate(batch if placed is not None else ()):
            self._shards[value, 0] = [shard[i] for shard in placed or ()]
        for value in apart:
            self.values_for(value, OWN)

    # From the towers to whole values.

    def _meet(self, value: Value, need: Need) -> tf.Tensor:
        """Returns what the towers have as one value, on the parameter device."""
        if need == OWN or value.fact == ONCE:  # an open size, or a value that towers have alike
            if value in self._inputs:
                return self._inputs[value]
            return self.towers[0][value]
        if value in self.whole.values:
            return self.whole.values[value]
        if value not in self._met:
            with tf.device(self.machine.home):
                if self._is_sum(value):
                    self._met[value] = add_tree(self.tree(value))[0]
                elif value.fact == EACH:
                    first = self.values_for(value, OWN)[0]
                    self._met[value] = self.machine.exchange.broadcast([first])[0]
                else:
                    self._met[value] = self._joined(value)
        return self._met[value]

    def add_up(self, values: Iterable[Value]) -> None:
        """Begins to add the parts of those values that are sums, which travel together.

        A value that each tower has for itself becomes the average, weighted by rows.
        """
        known = (self._trees, self._met, self.whole.values)
        parts = dict.fromkeys(filter(self._is_sum, values))
        new = [v for v in parts if all(v not in found for found in known)]
        by_devices: dict[tuple[str, ...], list[Value]] = {}
        for value in new:
            by_devices.setdefault(tuple(self._devices_of(value)), []).append(value)
        for devices, group in by_devices.items():
            own = list(map(self._parts, group))
            tree = self._reduce(list(map(list, zip(*own, strict=True))), devices)
            self._trees.update((value, _of(tree, i)) for i, value in enumerate(group))

    def know(self, sums: Mapping[Value, tf.Tensor]) -> None:
        """Takes sums that have been made already, on the parameter device."""
        self._met.update(sums)

    def tree(self, value: Value) -> Tree:
        """Returns the additions of a value's parts that remain for the parameter device."""
        if value in self._met:
            return [self._met[value]]
        self.add_up([value])
        return self._trees[value]

    def additions(self, value: Value) -> Tree:
        """Returns what remains of the additions of any whole value; without any, [the value]."""
        if value.fact == PART:
            return self.tree(value)
        return [self.whole.read(value, WHOLE)]

    def _devices_of(self, value: Value) -> Sequence[str]:
        """Returns the device on which each tower has a value."""
        return self.places_of.get(value, self.machine.devices)

    def _reduce(self, values: list[Tensors], devices: Sequence[str]) -> Tree:
        machine = self.machine
        with tf.name_scope(f"{SUM}/"), tf.device(machine.home):
            return machine.exchange.reduce(values, devices, machine.policy, machine.home)

    def _is_sum(self, value: Value) -> bool:
        # With batch_norm="tower0", the moving averages follow the statistics of tower 0 alone.
        is_averaged = value.dtype.is_floating and self.machine.batch_norm != "tower0"
        return value.fact == PART or value.fact == EACH and is_averaged

    def _parts(self, value: Value) -> Tensors:
        """Returns what each tower adds to a sum."""
        own, weighted = self.values_for(value, OWN), []
        if value.fact == PART:
            return own
        for each, place, device in zip(own, self.places, self._devices_of(value), strict=True):
            with tf.device(device):
                share = tf.cast(place.count / self.total, value.dtype)
                weighted.append(tf.where(place.has_rows, each * share, tf.zeros_like(each)))
        return weighted

    def _joined(self, value: Value) -> tf.Tensor:
        """Returns the rows of all towers, in order."""
        axis = value.fact.axis
        parts = self.real_parts(value)
        if value.fact.kind == "blocks":
            return self._joined_blocks(parts, value.fact.num_blocks)
        if self.machine.exchange.is_alone:
            return tf.concat(parts, axis)
        front = [axis, *(a for a in range(value.shape.rank or 1) if a != axis)]
        rows = self.machine.exchange.concat([tf.transpose(part, front) for part in parts])
        return tf.transpose(rows, [front.index(a) for a in range(len(front))])

    def _joined_blocks(self, tower_rows: Tensors, count: int) -> tf.Tensor:
        """Returns the rows of all towers, in order within each of B blocks.

        tower_rows: for each tower, its B * n rows.
        """
        front = [1, 0, *range(2, tower_rows[0].shape.rank + 1)]
        parts = []
        for part in tower_rows:
            divided = tf.reshape(part, tf.concat([[count, -1], tf.shape(part)[1:]], 0))
            parts.append(tf.transpose(divided, front))  # [n, B, ...]
        joined = tf.transpose(self.machine.exchange.concat(parts), front)
        return tf.reshape(joined, tf.concat([[-1], tf.shape(joined)[2:]], 0))

    def real_parts(self, value: Value) -> Tensors:
        """Returns what each tower adds to a value: no rows, if the tower has none."""
        parts = self.values_for(value, OWN)
        if value.fact == PART:
            return parts
        if value not in self._real_parts:
            kept = []
            for t, part, place, device in zip(
                self.machine.exchange.local_towers, parts, self.places, self._devices_of(value),
                strict=True,
            ):  # fmt: skip
                if t > 0:  # tower 0 has a row of every batch
                    with tf.device(device):
                        shape = tf.shape(part)
                        is_kept = tf.one_hot(value.fact.axis, tf.size(shape), place.has_rows, True)
                        part = tf.slice(part, tf.zeros_like(shape), tf.where(is_kept, shape, 0))
                part.set_shape(open_shape(value))  # workers exchange by the shapes they know
                kept.append(part)
            self._real_parts[value] = kept
        return self._real_parts[value]

    def _agree(self, drawn: Tensors) -> Tensors:
        """Returns the chief's values; lists stay, because only what is read from them counts."""
        values = [None if value.dtype == tf.variant else value for value in drawn]
        chiefs = self.machine.exchange.broadcast(values)
        return [old if new is None else new for old, new in zip(drawn, chiefs, strict=True)]

    # From whole values to the towers.

    def values_for(self, value: Value, need: Need, devices: Sequence[str] | None = None) -> Tensors:
        """Returns, for each tower, a value as a stage reads it.

        devices: the device on which each tower reads it. Default: `Machine.devices`.
        """
        # The towers may have it already, on their devices.
        if need == OWN and value in self.towers[0]:
            return [tower[value] for tower in self.towers]
        if need in (OWN, WHOLE) and value.fact == ONCE or need == WHOLE:
            found = []
            for device in devices or self.machine.devices:
                sent = self._sent[device]  # TensorFlow sends what is not sent packed
                found.append(sent[value] if value in sent else self.whole.read(value, WHOLE))
            return found
        # Rows that no tower has yet are cut from the whole value, once for each axis.
        if need == OWN:
            axis = value.fact.axis
        else:
            axis = need.axis
        if (value, axis) not in self._shards:
            is_given = value in self._inputs
            device = HOST if is_given else self.machine.home
            if is_given:
                whole = self._inputs[value]
            else:
                whole = self.whole.read(value, WHOLE)
            with tf.name_scope(f"{SPLIT}/"), tf.device(device):
                self._shards[value, axis] = self._cut(whole, axis)
        return self._shards[value, axis]

    def send(self, values: Iterable[Value], devices: Sequence[str]) -> None:
        """Sends whole values to the devices of the towers, small ones packed."""
        machine = self.machine
        if not machine.policy.pack_transfers:
            return
        known = self._sent[devices[0]]
        new = [v for v in dict.fromkeys(values) if v not in known and v not in self.towers[0]]
        tensors = [self.whole.read(value, WHOLE) for value in new]
        arrived = spread(tensors, machine.home, dict.fromkeys(devices), packed=True)
        for device, found in arrived.items():
            self._sent[device].update(zip(new, found, strict=True))

    def receive(self, value: Value, by_device: Mapping[str, tf.Tensor]) -> None:
        """Takes a whole value as it is on each device."""
        for device, tensor in by_device.items():
            self._sent[device][value] = tensor

    def _cut(self, whole: tf.Tensor, axis: int) -> Tensors:
        """Returns each tower's rows along an axis of a value of the batch."""
        shape = tf.shape(whole)
        rows_each = shape[axis] // self.total
        at_axis = tf.one_hot(axis, tf.size(shape), True, False)
        with tf.control_dependencies([
            tf.debugging.assert_equal(rows_each * self.total, shape[axis], "rows of the batch")
        ]):  # fmt: skip
            shards = []
            for place in self.places:
                begin = tf.where(at_axis, rows_each * place.start, 0)
                size = tf.where(at_axis, rows_each * place.count, shape)
                shards.append(tf.slice(whole, begin, size))
                shards[-1].set_shape([None if a == axis else n for a, n in enumerate(whole.shape)])
        return shards


def _of(tree: Tree, index: int) -> Tree:
    """Returns the tree of one value."""
    if isinstance(tree, tuple):
        left, right = tree
        return _of(left, index), _of(right, index)
    return [tree[index]]
