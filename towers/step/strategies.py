"""Keeps the parameters in one place, or a copy of them on every device, whole or in slices.

    parameter_server                      mirrored

      [parameters] on their device          /gpu:0                    /gpu:1
        /         \\                         [tower 0]                 [tower 1]
    /gpu:0      /gpu:1                          |  <-- a slice of the     |
    [tower 0]   [tower 1]                       |  gradients to each -->  |
        \\         /                             |  <-- slices' sums -->   |
      [parameters] <- one update            [parameters] <- update    [copy] <- the same update

With "sharded", each device keeps the sum of its slice, updates this slice of the parameters and of
the optimizer's slots, and sends the new parameters to the others.

All add in the order of one tree and use the same traced update, so results are bit-identical. If
layers are in stages, the parameter server sends each device only its stage's parameters.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from towers.graph.merged import merge_repeats
from towers.machine.devices import HOST, Policy, short_name
from towers.machine.keras_internals import slices_updated, stored_in
from towers.machine.tensorflow_internals import custom_gradients_forgotten
from towers.machine.user_lines import warn_user
from towers.step.averaging import Tree, Values, add_subtrees, add_tree, partial_sums, subtrees
from towers.step.checks import check_strategy
from towers.step.exchange import Exchange
from towers.step.lookups import join_lookups
from towers.step.slices import (
    SlicedVariable, check_elementwise, check_slots, cut_shapes, join_slices, put_in_slices, slice_of
)
from towers.step.stages import Stages
from towers.step.structures import components, packed
from towers.step.transfers import pack, packages, spread, unpack
from towers.step.update import update


class ParameterServer:
    """Keeps the parameters and the optimizer on the parameter device.

    packed: whether small values travel as one vector for each dtype.
    num_bytes, num_copies: the bytes that a refresh sends to each copy; the number of copies.
    sliced_on: the devices that keep slices of the optimizer's slots.
    """

    num_bytes, num_copies = 0, 0
    sliced_on: Sequence[str] = ()

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable],
        parameter_device: str, policy: Policy, exchange: Exchange,
    ) -> None:
        """`optimizer` is built for the V `parameters`."""
        self.parameter_device, self.packed = parameter_device, policy.pack_transfers
        self.optimizer, self.parameters, self.exchange = optimizer, list(parameters), exchange
        self._add_on_devices = policy.add_on_devices
        are_beside = not self._away(self.parameters)
        self._away_variables = self._away(optimizer.variables) if are_beside else []
        with tf.init_scope(), tf.device(parameter_device):
            self._beside = [
                tf.Variable(tf.zeros(v.shape, v.dtype), name=v.name) for v in self._away_variables
            ]

    def _away(self, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
        return [v for v in variables if short_name(v.value.device) != self.parameter_device]

    def spread(self, state: Sequence[Any], devices: Iterable[str]) -> dict[str, list[tf.Tensor]]:
        """Reads the V parameters and the variables in `state` once; returns them by device."""
        values = [tf.convert_to_tensor(v.value) for v in [*self.parameters, *state]]
        return spread(values, self.parameter_device, devices, packed=self.packed)

    def reduce(self, values: list[Values], devices: Sequence[str]) -> Tree:
        """Returns the tree of the remaining additions, given this worker's towers x V values."""
        with tf.device(self.parameter_device):
            return self.exchange.reduce(
                values, devices, add_on_devices=self._add_on_devices,
                parameter_device=self.parameter_device, packed=self.packed,
            )

    def add_up(self, values: list[Values], devices: Sequence[str]) -> Tree:
        """Returns the argument of `update`; values: towers x [loss, V gradients, S statistics]."""
        return self.reduce(values, devices)

    def update(self, tree: Tree) -> tuple[tf.Tensor, Values]:
        """Calls the optimizer on the result of `add_up`; returns (loss, S statistics)."""
        with self.optimizer_beside_parameters():
            return update(tree, self.optimizer, self.parameters)

    def refresh(self) -> None:
        """Copies parameters and optimizer variables to devices that keep copies; here none does."""

    def trust(self, is_trusted: bool) -> None:
        """Sets whether copies stay valid because only `update` assigns parameters and optimizer."""

    @contextmanager
    def optimizer_beside_parameters(self) -> Iterator[None]:
        """Replaces the optimizer's variables by copies on the parameter device inside the block.

        TensorFlow puts variables that were created outside of `tf.device` on a GPU, if there is
        one. These are the iterations and the learning rate; an XLA program on /cpu:0 cannot read
        them. Keras puts slots beside their parameters. The variables are not moved, because
        callbacks, checkpoints and traced functions refer to them. If a parameter is on another
        device, too, nothing is copied: no program of one device can update both.
        """
        check_slots(self.optimizer, self.sliced_on)
        for variable, copy in zip(self._away_variables, self._beside, strict=True):
            copy.assign(variable.value)
        with stored_in(self._away_variables, self._beside):
            yield
        for variable, copy in zip(self._away_variables, self._beside, strict=True):
            variable.value.assign(copy)


class StageServer(ParameterServer):
    """Keeps the parameters on the parameter device, for towers whose layers are in stages.

    Each device adds only the values of its stage. Values travel one by one: TensorFlow sends a
    parameter only to the devices of its stage.
    """

    def __init__(self, *args: Any, stages: Stages) -> None:
        super().__init__(*args)
        self._groups, self.packed = stages.groups, False

    def add_up(self, values: list[Values], devices: Sequence[str]) -> Tree:
        groups = [list(self._groups[first]) for first in devices]
        chosen: list[list[int]] = [[] for _ in groups[0]]
        for i, value in enumerate(values[0]):
            tensors = components(value)  # none in a gradient that is None
            chosen[groups[0].index(short_name(tensors[0].device)) if tensors else 0].append(i)
        trees = [
            self.reduce([[of[i] for i in own] for of in values], [group[stage] for group in groups])
            for stage, own in enumerate(chosen)
        ]
        return _joined(trees, list(itertools.chain(*chosen)))


def _joined(trees: Sequence[Tree], places: Sequence[int]) -> Tree:
    """Joins trees of one shape; `places`: the index of each value in the result, tree by tree."""
    if isinstance(trees[0], tuple):
        left, right = (_joined(halves, places) for halves in zip(*trees, strict=True))
        return left, right
    found = dict(zip(places, itertools.chain(*trees), strict=True))
    return [found[place] for place in range(len(places))]


class Sums(list):
    """Holds the sums on the parameter device, as a list; `by_device` has those on each device."""

    by_device: Mapping[str, Values]


class Mirrored(ParameterServer):
    """Keeps a copy of parameters and optimizer on every device; the first device has the originals.

    If it is sharded, each device keeps and updates a slice of the large slots and parameters.
    Files, callbacks and metrics use only the model's variables. Values that others assign to them
    are copied when a step begins, unless `trust` says that there are none.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable],
        devices: Sequence[str], policy: Policy, exchange: Exchange, *, is_sharded: bool = False,
    ) -> None:
        """`devices`: the devices of this worker's towers; the first is the parameter device."""
        super().__init__(optimizer, parameters, devices[0], policy, exchange)
        self._devices = list(devices)
        self.sliced_on = self._devices if is_sharded else []
        check_slots(optimizer, self.sliced_on)
        shapes = cut_shapes(parameters, len(devices)) if is_sharded else set()
        # Keras does not tell the parameter of a slot, but both have one shape.
        self._slots = [v for v in optimizer.variables if tuple(v.shape) in shapes]
        self._parts = {
            i: SlicedVariable(v.value, devices)
            for i, v in enumerate(parameters) if tuple(v.shape) in shapes
        }
        self._sliced = [*self._parts.values(), *(put_in_slices(v, devices) for v in self._slots)]
        copied = {id(v): v for v in [*parameters, *optimizer.variables]}
        self._own = [v for v in copied.values() if all(v is not slot for slot in self._slots)]
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
            self._stays_stale = tf.Variable(True, trainable=False, name="stays_stale")
        self._is_trusted = False

    def trust(self, is_trusted: bool) -> None:
        if is_trusted != self._is_trusted:  # because an assignment takes 50 us
            self._is_trusted = is_trusted
            self._stays_stale.assign(not is_trusted)
            self._is_stale.assign(True)  # someone may have assigned before this call

    def refresh(self) -> None:
        values = [tf.convert_to_tensor(v.value) for v in self._own]
        arrived = spread(values, self.parameter_device, self._copies, packed=self.packed)
        for device, copies in self._copies.items():
            with tf.device(device):
                for copy, value in zip(copies, arrived[device], strict=True):
                    copy.assign(value)

    def spread(self, state: Sequence[Any], devices: Iterable[str]) -> dict[str, list[tf.Tensor]]:
        def refreshed() -> tf.Tensor:
            with tf.device(self.parameter_device):
                self.refresh()
            self._is_stale.assign(self._stays_stale)
            return tf.zeros([])

        tf.cond(self._is_stale, refreshed, lambda: tf.zeros([]))
        values = [tf.convert_to_tensor(v.value) for v in state]
        found = spread(values, self.parameter_device, devices, packed=self.packed)
        own = {self.parameter_device: [v.value for v in self.parameters], **self._copies}
        for device in found:
            with tf.device(device):
                held = own[device][:len(self.parameters)]
                found[device] = [*map(tf.convert_to_tensor, held), *found[device]]
        return found

    def add_up(self, values: list[Values], devices: Sequence[str]) -> Sums:
        is_cut = [  # the loss comes first; without gradients, other values follow
            i - 1 in self._parts and getattr(v, "shape", None) == self._parts[i - 1].shape
            for i, v in enumerate(values[0])
        ]
        in_slices = [
            package for cut in (False, True) for package in packages(
                [v if cut == is_cut[i] else None for i, v in enumerate(values[0])])
            if self.exchange.is_alone  # else workers do it
        ]
        done = {i for chosen, _ in in_slices for i in chosen}
        others = [[None if i in done else v for i, v in enumerate(of)] for of in values]
        added = add_tree(self.reduce(others, devices))
        by_device = spread(added, self.parameter_device, self._devices, packed=self.packed)
        for chosen, shapes in in_slices:
            cut = is_cut[chosen[0]]
            slices = self._slices([[of[i] for i in chosen] for of in values], devices, cut)
            if cut:
                shapes = [self._parts[i - 1].slices[0].shape for i in chosen]
            for own, device in zip(slices, self._devices, strict=True):
                with tf.device(device):
                    parts = unpack(own if cut else tf.concat(slices, axis=0), shapes)
                for i, part in zip(chosen, parts, strict=True):
                    by_device[device][i] = part
        sums = Sums(by_device[self.parameter_device])
        sums.by_device = by_device
        for i in filter(is_cut.__getitem__, done):  # the graph of an update drops these
            found = [by_device[device][i] for device in self._devices]
            sums[i] = join_slices(found, self._parts[i - 1].shape)
        return sums

    def _slices(
        self, values: Sequence[Values], devices: Sequence[str], cut: bool
    ) -> list[tf.Tensor]:
        """Returns the slices of a package's sum; each device adds one slice and keeps it.

        cut: whether a slice consists of slices of all values.
        """
        count = len(self._devices)
        parts: dict[range, list[tf.Tensor]] = {}
        for owner, towers in subtrees([self._devices.index(device) for device in devices]):
            device = self._devices[owner]
            own = [values[tower] for tower in towers]
            added = add_tree(partial_sums(own, [device] * len(own), add_on_devices=True))
            with tf.device(device):
                parts[towers] = [
                    pack([slice_of(v, v.shape, k, count) for v in added]) for k in range(count)
                ] if cut else tf.split(pack(added, count), count)
        sums = []
        for i, device in enumerate(self._devices):
            with tf.device(device):
                slices = {towers: of[i] for towers, of in parts.items()}
                sums.append(add_subtrees(slices, range(len(values))))
        return sums

    def update(self, tree: Tree) -> tuple[tf.Tensor, Values]:
        assert isinstance(tree, Sums)
        loss, *sums = tree
        program = None
        with self.optimizer_beside_parameters():
            copies = {self.parameter_device: [v.value for v in self._own], **self._copies}
            originals = [*copies[self.parameter_device], *(v.slices[0] for v in self._sliced)]
            index = {id(variable.handle): i for i, variable in enumerate(originals)}
            for k, device in enumerate(self._devices):
                with tf.device(device):
                    gradients = [
                        join_lookups(gradient, v.shape)
                        for gradient, v in zip(tree.by_device[device][1:], self.parameters)
                    ]
                    for i, part in self._parts.items():
                        own = slice_of(copies[device][i], part.shape, k, len(self._devices))
                        part.slices[k].assign(own)
                        gradients[i] = slice_of(gradients[i], part.shape, k, len(self._devices))
                    if program is None:
                        program, captured = self._program(gradients, index)
                    updated = [*copies[device], *(v.slices[k] for v in self._sliced)]
                    program(components(gradients), [
                        updated[index[id(v)]].handle if id(v) in index else v for v in captured
                    ])
        self._send_slices(copies)
        return loss, sums[len(self.parameters):]

    def _send_slices(self, copies: Mapping[str, Sequence[tf.Variable]]) -> None:
        """Assigns the updated slices of parameters to the copies on each device."""
        arrived = [
            spread([tf.convert_to_tensor(part.slices[k]) for part in self._parts.values()],
                   source, self._devices, packed=self.packed)
            for k, source in enumerate(self._devices)
        ]
        for device in self._devices:
            with tf.device(device):
                for j, (i, part) in enumerate(self._parts.items()):
                    slices = [by_device[device][j] for by_device in arrived]
                    copies[device][i].assign(join_slices(slices, part.shape))

    def _program(self, gradients: Values, own: Collection[int]) -> tuple[Any, list[tf.Tensor]]:
        """Traces the update once; returns a function of V gradients and of all that it captures.

        Returns the captured tensors, too. Raises ValueError if one is a variable whose handle's id
        is not in `own`, because devices would have no copy of it.
        """
        def traced_update(*flat: tf.Tensor) -> tf.Tensor:
            self.optimizer.apply(packed(gradients, iter(flat)), self.parameters)
            return merge_repeats(tf.zeros([]))

        replaced = [*(self.parameters[i] for i in self._parts), *self._slots]
        with custom_gradients_forgotten(), tf.device(None), slices_updated(
            self.optimizer, replaced, [each.slices[0] for each in self._sliced]
        ):
            traced = tf.function(traced_update, autograph=False).get_concrete_function(
                *(tf.TensorSpec(v.shape, v.dtype) for v in components(gradients))
            )
        if any(v.dtype == tf.resource and id(v) not in own for v in traced.captured_inputs):
            raise ValueError(
                "strategy=mirrored or sharded: the optimizer uses a variable that is not among its "
                "`variables`, and of which devices would have no copy. Use "
                "strategy=parameter_server."
            )

        def update_program(flat: Sequence[tf.Tensor], captured: Sequence[tf.Tensor]) -> Any:
            types = [v.dtype for v in traced.outputs]
            return tf.raw_ops.StatefulPartitionedCall(args=[*flat, *captured], Tout=types, f=traced)

        is_dense = not any(isinstance(v, tf.IndexedSlices) for v in gradients)
        function = tf.function(update_program, autograph=False, jit_compile=is_dense)
        return function, traced.captured_inputs


def make_strategy(
    name: str, optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable],
    parameter_device: str, devices: Sequence[str], policy: Policy, exchange: Exchange,
    stages: Stages | None,
) -> ParameterServer:
    """Returns the strategy of a step; `devices`: the device of each of this worker's towers.

    Devices that share one memory need no copies. Raises ValueError if the name is unknown,
    mirrored parameters are not on the first device, or the optimizer does not suit slices.
    """
    check_strategy(name)
    if name == "sharded":
        check_elementwise(optimizer)
    if name != "parameter_server" and policy.shares_memory:
        warn_user(
            f"strategy={name}: these devices share one memory: the parameters stay where they "
            "are, and no copies are made.",
        )
    server = optimizer, parameters, parameter_device, policy, exchange
    if stages is not None:
        return StageServer(*server, stages=stages)
    if name == "parameter_server" or policy.shares_memory:
        return ParameterServer(*server)
    places = list(dict.fromkeys(devices))
    elsewhere = [v for v in parameters if short_name(v.value.device) != places[0]]
    if elsewhere:
        at = short_name(elsewhere[0].value.device)
        raise ValueError(
            f"strategy={name}: {elsewhere[0].path} is on {at}, and the model's own variables are "
            f"the copy of the first device, {places[0]}. Make the model under "
            f"tf.device({places[0]!r}), or use strategy=parameter_server."
        )
    if len(places) < 2:
        return ParameterServer(*server)
    sharded = name == "sharded"
    return Mirrored(optimizer, parameters, places, policy, exchange, is_sharded=sharded)
