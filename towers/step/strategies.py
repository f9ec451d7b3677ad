"""Where the parameters are, and so what travels: one set of them, or a copy on every device.

    parameter_server                      mirrored

      [parameters] on their device          /gpu:0                    /gpu:1
        /         \\                         [tower 0]                 [tower 1]
    /gpu:0      /gpu:1                          |  <-- a slice of the     |
    [tower 0]   [tower 1]                       |  gradients to each -->  |
        \\         /                             |  <-- slices' sums -->   |
      [parameters] <- one update            [parameters] <- update    [copy] <- the same update

Both add in the order of the one tree and make the one update, traced once: same bits. Where the
layers are in stages, the parameter server sends each device its own stage's parameters.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from towers.graph.merged import once
from towers.machine.devices import HOST, short_name
from towers.machine.policy import Policy
from towers.machine.tensorflow_internals import custom_gradients_forgotten
from towers.step.averaging import Tree, Values, add_tree, partial_sums
from towers.step.checks import check_strategy
from towers.step.copies import Copies
from towers.step.exchange import Plan, Subtree, add_plan, make_plan, subtrees
from towers.step.lookups import whole
from towers.step.stages import Stages
from towers.step.transfers import pack, packages, spread, unpack
from towers.step.update import update


Reduce: TypeAlias = Callable[[list[Values], Sequence[str]], Tree]


class ParameterServer:
    """The parameters and the optimizer on their device alone, the home.

    home: its name.
    num_bytes, num_copies: what a refresh sends to each copy, and to how many.
    """

    num_bytes, num_copies = 0, 0

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable],
        home: str, *, packed: bool,
    ) -> None:
        """
        Args:
            optimizer: built for the parameters. parameters: the V that it updates.
            home: their device.
            packed: whether small values travel as one vector a dtype.
        """
        self.home = home
        self._optimizer, self._parameters, self._packed = optimizer, list(parameters), packed
        self._at_home = Copies(home)

    def spread(self, state: Sequence[Any], devices: Iterable[str]) -> dict[str, list[tf.Tensor]]:
        """The values of the V parameters and of further variables, on each device.

        Every variable is read once, here.
        """
        values = [tf.convert_to_tensor(v.value) for v in [*self._parameters, *state]]
        return spread(values, self.home, devices, packed=self._packed)

    def add_up(
        self, values: list[Values], devices: Sequence[str], reduce: Reduce
    ) -> Tree:
        """What is left of the tree of additions over all towers.

        Args:
            values: this worker's towers x [loss, V gradients ..., S statistics ...].
            devices: of each of these.
            reduce: of values and devices, over all workers, see `TowerStep.reduce`.
        """
        return reduce(values, devices)

    def update(self, tree: Tree) -> tuple[tf.Tensor, Values]:
        """Calls the optimizer on what `add_up` has returned; returns (loss, S statistics)."""
        with self._at_home.used(self._optimizer, self._parameters):
            return update(tree, self._optimizer, self._parameters)

    def refresh(self) -> None:
        """Lets every device know what others than `update` have assigned."""

    def trust(self, is_trusted: bool) -> None:
        """Whether, until told otherwise, only `update` assigns to parameters and optimizer."""


class StageServer(ParameterServer):
    """The parameters on the home, for towers whose layers are in stages.

    A device receives, and adds up, what its own stage has.
    """

    def __init__(self, *args: Any, stages: Stages, packed: bool) -> None:
        """
        Args:
            args, packed: as of `ParameterServer`.
            stages: of the model.
        """
        super().__init__(*args, packed=packed)
        self._stages, self._groups = stages, stages.groups

    def spread(self, state: Sequence[Any], devices: Iterable[str]) -> dict[str, list[tf.Tensor]]:
        """The values by the first device of each group, each on its stage's device; and at home."""
        variables = [*self._parameters, *state]
        values = [tf.convert_to_tensor(v.value) for v in variables]
        arrived = {first: list(values) for first in [*self._groups, self.home]}
        of_variables = self._stages.of(variables)
        for stage in range(self._stages.num_stages):
            own = [i for i, other in enumerate(of_variables) if other == stage]
            places = [group[stage] for group in self._groups.values()]
            found = spread([values[i] for i in own], self.home, places, packed=self._packed)
            for first, group in self._groups.items():
                for i, value in zip(own, found[group[stage]], strict=True):
                    arrived[first][i] = value
        return arrived

    def add_up(
        self, values: list[Values], devices: Sequence[str], reduce: Reduce
    ) -> Tree:
        groups = [list(self._groups[first]) for first in devices]
        chosen: list[list[int]] = [[] for _ in groups[0]]
        for i, value in enumerate(values[0]):
            chosen[groups[0].index(_device_of(value)) if value is not None else 0].append(i)
        trees = [
            reduce([[of[i] for i in own] for of in values], [group[stage] for group in groups])
            for stage, own in enumerate(chosen)
        ]
        return _joined(trees, [i for own in chosen for i in own])


class Sums(list):
    """The sums on the home.

    by_device: on each device.
    """

    def __init__(self, home: str, by_device: Mapping[str, Values]) -> None:
        super().__init__(by_device[home])
        self.by_device = by_device


class Mirrored(ParameterServer):
    """A copy on every device; the model's own variables are the first device's.

    Files, callbacks and metrics see these alone. What others assign to them reaches the copies as
    a call begins, unless it was told to trust the copies.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable],
        devices: Sequence[str], *, packed: bool, is_alone: bool,
    ) -> None:
        """
        Args:
            optimizer, parameters, packed: as of `ParameterServer`.
            devices: the first is the parameters'.
            is_alone: whether there are no other workers.
        """
        super().__init__(optimizer, parameters, devices[0], packed=packed)
        self._devices, self._is_alone = list(devices), is_alone
        self._own = list({id(v): v for v in [*parameters, *optimizer.variables]}.values())
        self._copies: dict[str, list[tf.Variable]] = {}
        for device in self._devices[1:]:
            with tf.device(device):
                self._copies[device] = [
                    tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False, name=v.name)
                    for v in self._own
                ]
        self.num_bytes = sum(tf.as_dtype(v.dtype).size * math.prod(v.shape) for v in self._own)
        self.num_copies = len(self._copies)
        with tf.device(HOST):
            self._is_stale = tf.Variable(True, trainable=False, name="stale")
        self._is_trusted = False

    def trust(self, is_trusted: bool) -> None:
        if is_trusted != self._is_trusted:  # an assignment takes 50 us
            self._is_trusted = is_trusted
            self._is_stale.assign(not is_trusted)

    def refresh(self) -> None:
        values = [tf.convert_to_tensor(v.value) for v in self._own]
        arrived = spread(values, self.home, self._copies, packed=self._packed)
        for device, copies in self._copies.items():
            with tf.device(device):
                for copy, value in zip(copies, arrived[device], strict=True):
                    copy.assign(value)

    def spread(self, state: Sequence[Any], devices: Iterable[str]) -> dict[str, list[tf.Tensor]]:
        def refreshed() -> tf.Tensor:
            with tf.device(self.home):
                self.refresh()
            return tf.zeros([])

        tf.cond(self._is_stale, refreshed, lambda: tf.zeros([]))
        values = [tf.convert_to_tensor(v.value) for v in state]
        found = spread(values, self.home, devices, packed=self._packed)
        own = {self.home: [v.value for v in self._parameters], **self._copies}
        for device in found:
            with tf.device(device):
                held = own[device][:len(self._parameters)]
                found[device] = [*map(tf.convert_to_tensor, held), *found[device]]
        return found

    def add_up(
        self, values: list[Values], devices: Sequence[str], reduce: Reduce
    ) -> Sums:
        if not self._is_alone:  # workers have added in slices already
            added = add_tree(reduce(values, devices))
            everywhere = spread(added, self.home, self._devices, packed=self._packed)
            return Sums(self.home, everywhere)
        plan = make_plan([self._devices.index(device) for device in devices])
        in_slices = list(packages(values[0]))
        done = {i for chosen, _ in in_slices for i in chosen}
        others = [[None if i in done else v for i, v in enumerate(of)] for of in values]
        added = add_tree(partial_sums(others, devices, add_on_devices=True, home=self.home))
        sums = spread(added, self.home, self._devices, packed=False)
        for chosen, shapes in in_slices:
            slices = self._slices([[of[i] for i in chosen] for of in values], plan)
            for device in self._devices:
                with tf.device(device):
                    parts = unpack(tf.concat(slices, axis=0), shapes)
                for i, part in zip(chosen, parts, strict=True):
                    sums[device][i] = part
        return Sums(self.home, sums)

    def _slices(self, values: Sequence[Values], plan: Plan) -> list[tf.Tensor]:
        """The slices of a package's sum: each device adds one, and keeps it."""
        count = len(self._devices)
        parts: dict[Subtree, list[tf.Tensor]] = {}
        for subtree in subtrees(plan):
            device = self._devices[subtree.owner]
            own = [values[tower] for tower in subtree.towers]
            added = add_tree(partial_sums(own, [device] * len(own), add_on_devices=True))
            with tf.device(device):
                parts[subtree] = tf.split(pack(added, count), count)
        sums = []
        for i, device in enumerate(self._devices):
            with tf.device(device):
                sums.append(add_plan(plan, {s: of[i] for s, of in parts.items()}.__getitem__))
        return sums

    def update(self, tree: Tree) -> tuple[tf.Tensor, Values]:
        assert isinstance(tree, Sums)
        count = len(self._parameters)
        with self._at_home.used(self._optimizer, self._parameters):
            handles = {id(v.value.handle): i for i, v in enumerate(self._own)}
            program: _Program | None = None
            for device in self._devices:
                with tf.device(device):
                    gradients = [
                        whole(g, v.shape) for g, v in
                        zip(tree.by_device[device][1:1 + count], self._parameters, strict=True)
                    ]
                    if program is None:
                        program = _Program(self._apply, gradients, handles)
                    program.call(gradients, self._copies.get(device))
        return tree[0], tree[1 + count:]

    def _apply(self, gradients: Values) -> None:
        self._optimizer.apply(gradients, self._parameters)


class _Program:
    """An update that was traced once, for the variables of any device."""

    def __init__(self, apply: Callable, values: Values, variables: Mapping[int, int]) -> None:
        """
        Args:
            apply: of values.
            values: V gradients: tensors, IndexedSlices or None.
            variables: by the id of the handle of each variable that it may use, its index.

        Raises:
            ValueError: it uses another one.
        """
        def traced_update(*flat: tf.Tensor) -> tf.Tensor:
            given = iter(flat)
            apply(tf.nest.map_structure(
                lambda v: None if v is None else next(given), values, expand_composites=True
            ))
            return tf.zeros([])

        with custom_gradients_forgotten(), tf.device(None):
            traced = tf.function(once(traced_update), autograph=False).get_concrete_function(
                *(tf.TensorSpec(v.shape, v.dtype) for v in _flat(values))
            )
        self._captured, self._variables = traced.captured_inputs, variables
        if any(v.dtype == tf.resource and id(v) not in variables for v in self._captured):
            raise ValueError(_UNKNOWN)

        def update_program(flat: Sequence[tf.Tensor], captured: Sequence[tf.Tensor]) -> Any:
            types = [v.dtype for v in traced.outputs]
            return tf.raw_ops.StatefulPartitionedCall(args=[*flat, *captured], Tout=types, f=traced)

        is_dense = not any(isinstance(v, tf.IndexedSlices) for v in values)
        self._function = tf.function(update_program, autograph=False, jit_compile=is_dense)

    def call(self, values: Values, copies: Sequence[tf.Variable] | None) -> None:
        """Updates the copies of a device; home's own variables for None."""
        captured = [
            v if copies is None or id(v) not in self._variables
            else copies[self._variables[id(v)]].handle
            for v in self._captured
        ]
        self._function(_flat(values), captured)


def _device_of(value: Any) -> str:
    """The device of a tensor, or of the values of slices as of `lookups`."""
    while isinstance(value, tf.IndexedSlices | tuple):
        value = value.values if isinstance(value, tf.IndexedSlices) else value[0]
    return short_name(value.device)


def _joined(trees: Sequence[Tree], places: Sequence[int]) -> Tree:
    """One tree of trees of one shape; `places`: of their values, one tree's after the other's."""
    if isinstance(trees[0], tuple):
        left, right = (_joined(halves, places) for halves in zip(*trees, strict=True))
        return left, right
    found = dict(zip(places, itertools.chain.from_iterable(trees), strict=True))
    return [found[place] for place in range(len(places))]


_ONE_MEMORY = (
    "strategy=mirrored: these devices share one memory: the parameters stay where they are, and "
    "no copies are made."
)
_UNKNOWN = (
    "strategy=mirrored: the optimizer uses a variable that is not among its `variables`, and of "
    "which devices would have no copy. Use strategy=parameter_server."
)


def _flat(values: Values) -> list[tf.Tensor]:
    return [v for v in tf.nest.flatten(values, expand_composites=True) if v is not None]


def make_strategy(
    name: str,
    optimizer: keras.optimizers.Optimizer,
    parameters: Sequence[keras.Variable],
    home: str,
    devices: Sequence[str],
    policy: Policy,
    stages: Stages | None = None,
    *,
    is_alone: bool,
) -> ParameterServer:
    """The strategy of a step.

    Args:
        name: one of `choices.STRATEGIES`; devices that share one memory need no copies.
        optimizer, parameters, home: as of `ParameterServer`.
        devices: of each of this worker's towers.
        policy: how they are used.
        stages: of the layers; None: each device computes them all.
        is_alone: as of `Mirrored`.

    Raises:
        ValueError: there is no such strategy, or the parameters are not on the first device.
    """
    check_strategy(name)
    places = list(dict.fromkeys(devices))
    if name == "mirrored" and policy.shares_memory:
        warnings.warn(_ONE_MEMORY, stacklevel=3)
    packed = policy.pack_transfers
    if stages is not None:
        return StageServer(optimizer, parameters, home, stages=stages, packed=packed)
    server = ParameterServer(optimizer, parameters, home, packed=packed)
    if name == "parameter_server" or policy.shares_memory:
        return server
    elsewhere = [v for v in parameters if short_name(v.value.device) != places[0]]
    if elsewhere:
        at = short_name(elsewhere[0].value.device)
        raise ValueError(
            f"strategy=mirrored: {elsewhere[0].path} is on {at}, and the model's own variables are "
            f"the copy of the first device, {places[0]}. Make the model under "
            f"tf.device({places[0]!r}), or use strategy=parameter_server."
        )
    if len(places) < 2:
        return server
    return Mirrored(optimizer, parameters, places, packed=packed, is_alone=is_alone)
