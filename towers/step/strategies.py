"""Keeps the parameters in one place, or a copy of them on every device.

    parameter_server                      mirrored

      [parameters] on their device          /gpu:0                    /gpu:1
        /         \\                         [tower 0]                 [tower 1]
    /gpu:0      /gpu:1                          |  <-- a slice of the     |
    [tower 0]   [tower 1]                       |  gradients to each -->  |
        \\         /                             |  <-- slices' sums -->   |
      [parameters] <- one update            [parameters] <- update    [copy] <- the same update

Both add in the order of one tree and use the same traced update, so results are bit-identical. If
layers are in stages, the parameter server sends each device only its stage's parameters.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.graph.merged import with_merged_repeats
from towers.machine.devices import HOST, Policy, short_name
from towers.machine.tensorflow_internals import custom_gradients_forgotten
from towers.step.averaging import Tree, Values, add_subtrees, add_tree, partial_sums, subtrees
from towers.step.checks import check_strategy
from towers.step.exchange import Exchange
from towers.step.lookups import join_lookups
from towers.step.parameter_server import ParameterServer, StageServer
from towers.step.stages import Stages
from towers.step.structures import components, packed
from towers.step.transfers import pack, packages, spread, unpack


class Sums(list):
    """Holds the sums on the parameter device, as a list.

    by_device: the sums on each device.
    """

    def __init__(self, parameter_device: str, by_device: Mapping[str, Values]) -> None:
        super().__init__(by_device[parameter_device])
        self.by_device = by_device


class Mirrored(ParameterServer):
    """Keeps a copy of parameters and optimizer on every device; the first device has the originals.

    Files, callbacks and metrics use only the model's variables. Values that others assign to them
    are copied when a step begins, unless `trust` says that there are none.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable],
        devices: Sequence[str], policy: Policy, exchange: Exchange,
    ) -> None:
        """
        Args:
            optimizer, parameters, policy, exchange: the arguments of `ParameterServer`.
            devices: the devices of this worker's towers; the first is the parameter device.
        """
        super().__init__(optimizer, parameters, devices[0], policy, exchange)
        self._devices = list(devices)
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
        if is_trusted != self._is_trusted:  # because an assignment takes 50 us
            self._is_trusted = is_trusted
            self._is_stale.assign(not is_trusted)

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
        if not self.exchange.is_alone:  # workers have added in slices already
            added = add_tree(self.reduce(values, devices))
            sums = spread(added, self.parameter_device, self._devices, packed=self.packed)
            return Sums(self.parameter_device, sums)
        in_slices = list(packages(values[0]))
        done = {i for chosen, _ in in_slices for i in chosen}
        others = [[None if i in done else v for i, v in enumerate(of)] for of in values]
        added = add_tree(partial_sums(
            others, devices, add_on_devices=True, parameter_device=self.parameter_device
        ))
        sums = spread(added, self.parameter_device, self._devices, packed=False)
        for chosen, shapes in in_slices:
            slices = self._slices([[of[i] for i in chosen] for of in values], devices)
            for device in self._devices:
                with tf.device(device):
                    parts = unpack(tf.concat(slices, axis=0), shapes)
                for i, part in zip(chosen, parts, strict=True):
                    sums[device][i] = part
        return Sums(self.parameter_device, sums)

    def _slices(self, values: Sequence[Values], devices: Sequence[str]) -> list[tf.Tensor]:
        """Returns the slices of a package's sum; each device adds one slice and keeps it."""
        count = len(self._devices)
        parts: dict[range, list[tf.Tensor]] = {}
        for owner, _, towers in subtrees([self._devices.index(device) for device in devices]):
            device = self._devices[owner]
            own = [values[tower] for tower in towers]
            added = add_tree(partial_sums(own, [device] * len(own), add_on_devices=True))
            with tf.device(device):
                parts[towers] = tf.split(pack(added, count), count)
        sums = []
        for i, device in enumerate(self._devices):
            with tf.device(device):
                slices = {towers: of[i] for towers, of in parts.items()}
                sums.append(add_subtrees(slices, range(len(values))))
        return sums

    def update(self, tree: Tree) -> tuple[tf.Tensor, Values]:
        assert isinstance(tree, Sums)
        count = len(self.parameters)
        with self.optimizer_beside_parameters():
            handles = {id(v.value.handle): i for i, v in enumerate(self._own)}
            program: Callable | None = None
            for device in self._devices:
                with tf.device(device):
                    gradients = [
                        join_lookups(g, v.shape) for g, v in
                        zip(tree.by_device[device][1:1 + count], self.parameters, strict=True)
                    ]
                    if program is None:
                        program = _program(
                            lambda values: self.optimizer.apply(values, self.parameters),
                            gradients, handles,
                        )
                    program(gradients, self._copies.get(device))
        return tree[0], tree[1 + count:]


def _program(apply: Callable, values: Values, variables: Mapping[int, int]) -> Callable:
    """Traces an update once, for the variables of any device.

    Args:
        apply: applies V gradients to the model's variables.
        values: V gradients: tensors, IndexedSlices or None.
        variables: the index of each allowed variable, by the id of its handle.

    Returns:
        A function of V gradients and a device's copies (None: use the model's variables).

    Raises:
        ValueError: the update uses a variable that is not allowed.
    """
    def traced_update(*flat: tf.Tensor) -> tf.Tensor:
        apply(packed(values, iter(flat)))
        return tf.zeros([])

    with custom_gradients_forgotten(), tf.device(None):
        merged = with_merged_repeats(traced_update)
        traced = tf.function(merged, autograph=False).get_concrete_function(
            *(tf.TensorSpec(v.shape, v.dtype) for v in components(values))
        )
    captured = traced.captured_inputs
    if any(v.dtype == tf.resource and id(v) not in variables for v in captured):
        raise ValueError(
            "strategy=mirrored: the optimizer uses a variable that is not among its `variables`, "
            "and of which devices would have no copy. Use strategy=parameter_server."
        )

    def update_program(flat: Sequence[tf.Tensor], captured: Sequence[tf.Tensor]) -> Any:
        types = [v.dtype for v in traced.outputs]
        return tf.raw_ops.StatefulPartitionedCall(args=[*flat, *captured], Tout=types, f=traced)

    is_dense = not any(isinstance(v, tf.IndexedSlices) for v in values)
    function = tf.function(update_program, autograph=False, jit_compile=is_dense)

    def call(values: Values, copies: Sequence[tf.Variable] | None) -> None:
        function(components(values), [
            v if copies is None or id(v) not in variables else copies[variables[id(v)]].handle
            for v in captured
        ])

    return call


def make_strategy(
    name: str,
    optimizer: keras.optimizers.Optimizer,
    parameters: Sequence[keras.Variable],
    parameter_device: str,
    devices: Sequence[str],
    policy: Policy,
    exchange: Exchange,
    stages: Stages | None = None,
) -> ParameterServer:
    """Returns the strategy of a step.

    Args:
        name: one of `choices.STRATEGIES`. Devices that share one memory need no copies.
        optimizer, parameters, parameter_device, policy, exchange: arguments of the strategy.
        devices: the device of each of this worker's towers.
        stages: the stages of the layers; None if each device computes all layers.

    Raises:
        ValueError: the name is unknown, or mirrored parameters are not on the first device.
    """
    check_strategy(name)
    places = list(dict.fromkeys(devices))
    if name == "mirrored" and policy.shares_memory:
        warnings.warn(
            "strategy=mirrored: these devices share one memory: the parameters stay where they "
            "are, and no copies are made.", stacklevel=3,
        )
    if stages is not None:
        return StageServer(optimizer, parameters, parameter_device, policy, exchange, stages=stages)
    if name == "parameter_server" or policy.shares_memory:
        return ParameterServer(optimizer, parameters, parameter_device, policy, exchange)
    elsewhere = [v for v in parameters if short_name(v.value.device) != places[0]]
    if elsewhere:
        at = short_name(elsewhere[0].value.device)
        raise ValueError(
            f"strategy=mirrored: {elsewhere[0].path} is on {at}, and the model's own variables are "
            f"the copy of the first device, {places[0]}. Make the model under "
            f"tf.device({places[0]!r}), or use strategy=parameter_server."
        )
    if len(places) < 2:
        return ParameterServer(optimizer, parameters, parameter_device, policy, exchange)
    return Mirrored(optimizer, parameters, places, policy, exchange)
