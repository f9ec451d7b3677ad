"""Runs what towers compute between two meetings, within the caller's tf.function."""

from collections.abc import Callable, Collection, Sequence

import tensorflow as tf

from towers.divide.compiling import compiles, indices_are_valid, is_worth_it
from towers.divide.context import Context, Place, open_shape, reads
from towers.divide.facts import OWN, PART, WHOLE, Need, Op, Tensors, Value
from towers.divide.flat import outputs_of
from towers.divide.run import Run
from towers.machine.tensorflow_internals import KEEP_WHOLE, without_xla

_LARGE = 4096  # elements


class Stage:
    """Computes a tower's part between two meetings: the same operations on each device."""

    def __init__(
        self, ops: Sequence[Op], read_after: Collection[Value], before: Collection[Value] = ()
    ) -> None:
        """
        Args:
            ops: the operations, in an order that they can run in.
            read_after: the values that operations of other phases or stages read.
            before: the values that the tower has made since towers met.
        """
        self._ops = ops
        made = outputs_of(ops)
        own = set(made)
        found = (pair for op in ops for pair in reads(op) if pair[0] not in own)
        inputs = list(dict.fromkeys(found))
        self._passed = [pair for pair in inputs if pair[0] in before]
        self._received = [pair for pair in inputs if pair[0] not in before]
        self._inputs = [*self._received, *self._passed]
        self._outputs = [value for value in made if value in read_after]
        ends = [*(value for value, _ in self._inputs), *self._outputs]
        self._compiles = compiles(ops, ends)
        self.is_small_loop = self._compiles and is_worth_it(ops, ends)
        self._traced: Callable | None = None

    def call(self, run: Run) -> None:
        """Computes the results of each tower, on its device."""
        devices = run.machine.devices
        received = self.receive(run, devices)
        for t, device in enumerate(devices):
            self.call_tower(run, t, device, received)

    def receive(self, run: Run, devices: Sequence[str]) -> list[Tensors]:
        """Returns what the towers read of values from before they met, V values x T towers.

        devices: the device on which each tower will be called.
        """
        run.add_up(value for value, need in self._received if need == WHOLE)
        run.send([value for value, need in self._received if need == WHOLE], devices)
        run.places_of.update(dict.fromkeys(self._outputs, devices))
        return [run.values_for(value, need, devices) for value, need in self._received]

    def call_tower(self, run: Run, t: int, device: str, received: Sequence[Tensors]) -> None:
        """Computes the results of this worker's tower t on a device, given what all receive."""
        machine, tower_values = run.machine, run.towers[t]
        inputs = [values[t] for values in received]
        inputs += [tower_values[value] for value, _ in self._passed]
        tower = machine.exchange.local_towers[t]
        with tf.name_scope(f"tower_{tower}"), tf.device(device):
            results = self._results(run, t, _in_turn(run, device, inputs))
            if machine.policy.take_turns:
                # Wait for an operation: inlining drops control edges from a call.
                ends = [tf.identity(v) for v in results if v.dtype.is_floating]
                run.ends[device] = tf.group(ends)
        tower_values.update(zip(self._outputs, results, strict=True))

    def _results(self, run: Run, t: int, inputs: Tensors) -> Tensors:
        """Calls the function of a tower, given what it reads."""
        place, full = run.sent_places[t], run.compiled
        compiles_here = self.is_small_loop if run.machine.only_loops else self._compiles
        if full is not None and compiles_here:
            return self._function(self._with_xla)(place, inputs, full[t])
        return self._function(self._plain)(place, inputs)

    def _function(self, kind: Callable[[list[tf.TensorSpec]], tuple[Callable, list]]) -> Callable:
        """Returns the function of a tower, traced once for all of them.

        It takes the tower's place, packed, and what the tower reads. kind: `_plain` or `_with_xla`.
        """
        if self._traced is None:
            place = tf.TensorSpec([len(Place._fields)], tf.int32)
            specs = [_spec(value, need) for value, need in self._inputs]
            with tf.init_scope(), tf.device(None):
                tower, more = kind(specs)
                function = tf.function(tower, autograph=False, experimental_attributes=KEEP_WHOLE)
                self._traced = function.get_concrete_function(place, specs, *more)
        return self._traced

    def _plain(self, specs: list[tf.TensorSpec]) -> tuple[Callable, list]:
        """Returns what a tower computes without XLA."""

        def tower(place: tf.Tensor, given: Tensors) -> Tensors:
            place = _unpacked(place)
            return self._real(place, self._compute(place, given)[0])

        return tower, []

    def _with_xla(self, specs: list[tf.TensorSpec]) -> tuple[Callable, list]:
        """Returns what a tower computes with XLA if it has a full shard, a third argument."""

        def tower(place: Place, given: Tensors) -> tuple[Tensors, tf.Tensor]:
            results, context = self._compute(place, given)
            return results, indices_are_valid(self._ops, context.read)

        # XLA compiles again for each value of what a shape follows from: not for each place.
        scalar, flag = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.bool)
        function = tf.function(tower, autograph=False, jit_compile=True)
        traced = function.get_concrete_function(Place(scalar, scalar, scalar, flag), specs)

        def full_or_not(place: tf.Tensor, given: Tensors, is_full: tf.Tensor) -> Tensors:
            place = _unpacked(place)
            return self._real(place, chosen(is_full, traced, place, given))

        return full_or_not, [flag]

    def _compute(self, place: Place, given: Tensors) -> tuple[Tensors, Context]:
        """Emits the operations of one tower; returns the values of `_outputs`, and of all."""
        found = dict(zip(self._inputs, given, strict=True))
        context = Context(place, lambda value, need: found[value, need])
        context.run(self._ops)
        return [context.values[value] for value in self._outputs], context

    def _real(self, place: Place, results: Tensors) -> Tensors:
        """Returns results in which parts of sums are zero if the tower has no rows."""
        for value, result in zip(self._outputs, results, strict=True):
            if value.dtype != tf.variant:  # what TensorFlow chooses to compile has lost its shape
                result.set_shape(open_shape(value))
        is_part = [value.fact == PART and value.dtype != tf.variant for value in self._outputs]
        real = iter(_if_rows(place, [part for part, told in zip(results, is_part) if told]))
        return [next(real) if told else value for value, told in zip(results, is_part)]


def _unpacked(place: tf.Tensor) -> Place:
    count, start, total, has_rows = tf.unstack(place)
    return Place(count, start, total, has_rows > 0)


def _in_turn(run: Run, device: str, values: Tensors) -> Tensors:
    """Returns values that are ready after the last call on a device, if towers take turns."""
    if device not in run.ends:
        return values
    # A control edge to the call is not enough: inlined, only operations without inputs wait.
    with tf.control_dependencies([run.ends[device]]):
        return [tf.identity(value) for value in values]


def chosen(
    is_compiled: tf.Tensor, function: tf.types.experimental.ConcreteFunction, place: Place,
    inputs: Tensors,
) -> Tensors:  # fmt: skip
    """Returns the results of a function: compiled by XLA for full batches with valid indices.

    Without XLA, it raises the error of an index that is out of range.
    """

    def skipped() -> tuple[Tensors, tf.Tensor]:
        results, _ = function.structured_outputs
        return [tf.zeros([0] * (v.shape.rank or 0), v.dtype) for v in results], tf.constant(False)

    def plain() -> Tensors:
        return without_xla(function, place, inputs)[0]  # type: ignore[no-any-return]

    # Two conditions in turn, not one in the other: TensorFlow prepares each call of `plain`.
    results, is_done = tf.cond(is_compiled, lambda: function(place, inputs), skipped)
    return tf.nest.flatten(tf.cond(is_done, lambda: results, plain))  # type: ignore[no-any-return]


def _if_rows(place: Place, parts: Tensors) -> Tensors:
    """Returns parts of sums; zeros if the tower has no rows.

    A condition copies nothing, and a selection takes less time for small tensors.
    """
    large = {
        i: part for i, part in enumerate(parts) if (part.shape.num_elements() or _LARGE) >= _LARGE
    }

    def zeros() -> dict[int, tf.Tensor]:
        # TensorFlow's graph optimizer would compute zeros that follow from shapes alone before the
        # first step, and oneDNN keeps their memory. These follow from the number of rows.
        zero = tf.minimum(place.total, 0)
        return {i: tf.fill(tf.shape(part), tf.cast(zero, part.dtype)) for i, part in large.items()}

    kept = tf.cond(place.has_rows, lambda: large, zeros) if large else {}
    zero_of = {dtype: tf.zeros([], dtype) for dtype in {part.dtype for part in parts}}
    return [
        kept[i] if i in kept else tf.where(place.has_rows, part, zero_of[part.dtype])
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
