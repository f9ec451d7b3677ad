"""Keeps one set of parameters, on the parameter device, and sends it to all towers each step."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from towers.machine.devices import Policy, short_name
from towers.machine.keras_internals import stored_in
from towers.step.averaging import Tree, Values
from towers.step.exchange import Exchange
from towers.step.stages import Stages
from towers.step.transfers import spread
from towers.step.update import update


class ParameterServer:
    """Keeps the parameters and the optimizer on the parameter device.

    parameter_device, optimizer, parameters, exchange: the arguments of `__init__`.
    packed: whether small values travel as one vector for each dtype.
    num_bytes, num_copies: the bytes that a refresh sends to each copy; the number of copies.
    """

    num_bytes, num_copies = 0, 0

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable],
        parameter_device: str, policy: Policy, exchange: Exchange,
    ) -> None:
        """
        Args:
            optimizer: an optimizer built for `parameters`, the V variables that it updates.
            parameter_device: holds the parameters and makes the update.
            policy: whether to add on the towers' devices, and to pack transfers.
            exchange: adds values over the towers of all workers.
        """
        self.parameter_device, self.packed = parameter_device, policy.pack_transfers
        self.optimizer, self.parameters, self.exchange = optimizer, list(parameters), exchange
        self._add_on_devices = policy.add_on_devices
        self._borrowed: dict[int, tf.Variable] = {}  # by id; held here, as no trace keeps them

    def spread(self, state: Sequence[Any], devices: Iterable[str]) -> dict[str, list[tf.Tensor]]:
        """Reads the V parameters and the variables in `state` once; returns them on each device.

        Returns:
            Lists of V + len(state) tensors, by device.
        """
        values = [tf.convert_to_tensor(v.value) for v in [*self.parameters, *state]]
        return spread(values, self.parameter_device, devices, packed=self.packed)

    def reduce(self, values: list[Values], devices: Sequence[str]) -> Tree:
        """Returns the tree of the remaining additions over all towers.

        Args:
            values: this worker's towers x V values.
            devices: the device of each of these towers.
        """
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
        """Uses copies of the optimizer's variables, on the parameter device, inside the with block.

            before    copy <- variable          the variable may be on any device
            within    the optimizer reads and assigns the copy
            after     copy -> variable

        TensorFlow puts variables that were created outside of `tf.device` on a GPU, if there is
        one. These are the iterations and the learning rate; an XLA program on /cpu:0 cannot read
        them. Keras puts slots beside their parameters. The variables are not moved, because
        callbacks, checkpoints and traced functions refer to them. If a parameter is on another
        device, too, nothing is copied: no program of one device can update both.
        """
        are_beside = not self._away(self.parameters)
        away = self._away(self.optimizer.variables) if are_beside else []
        for variable in away:
            if id(variable) not in self._borrowed:
                with tf.init_scope(), tf.device(self.parameter_device):
                    self._borrowed[id(variable)] = tf.Variable(
                        tf.zeros(variable.shape, variable.dtype), name=variable.name
                    )
        copies = [self._borrowed[id(variable)] for variable in away]
        for variable, copy in zip(away, copies, strict=True):
            copy.assign(variable.value)
        with stored_in(away, copies):
            yield
        for variable, copy in zip(away, copies, strict=True):
            variable.value.assign(copy)

    def _away(self, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
        return [v for v in variables if short_name(v.value.device) != self.parameter_device]


class StageServer(ParameterServer):
    """Keeps the parameters on the parameter device, for towers whose layers are in stages.

    A device receives and adds only the values of its stage.
    """

    def __init__(self, *args: Any, stages: Stages) -> None:
        """
        Args:
            args: the arguments of `ParameterServer`.
            stages: the stages of the model's layers.
        """
        super().__init__(*args)
        self._stages, self._groups = stages, stages.groups
        self._packs_parameters, self.packed = self.packed, False  # sums lie on several devices

    def spread(self, state: Sequence[Any], devices: Iterable[str]) -> dict[str, list[tf.Tensor]]:
        """Returns the values on their stages' devices, by a group's first device."""
        variables = [*self.parameters, *state]
        values = [tf.convert_to_tensor(v.value) for v in variables]
        arrived = {first: list(values) for first in [*self._groups, self.parameter_device]}
        of_variables = self._stages.of(variables)
        for stage in range(self._stages.num_stages):
            own = [i for i, other in enumerate(of_variables) if other == stage]
            places = [group[stage] for group in self._groups.values()]
            chosen = [values[i] for i in own]
            found = spread(chosen, self.parameter_device, places, packed=self._packs_parameters)
            for first, group in self._groups.items():
                for i, value in zip(own, found[group[stage]], strict=True):
                    arrived[first][i] = value
        return arrived

    def add_up(self, values: list[Values], devices: Sequence[str]) -> Tree:
        groups = [list(self._groups[first]) for first in devices]
        chosen: list[list[int]] = [[] for _ in groups[0]]
        for i, value in enumerate(values[0]):
            chosen[groups[0].index(_device_of(value)) if value is not None else 0].append(i)
        trees = [
            self.reduce([[of[i] for i in own] for of in values], [group[stage] for group in groups])
            for stage, own in enumerate(chosen)
        ]
        return _joined(trees, [i for own in chosen for i in own])


def _device_of(value: Any) -> str:
    """Returns the device of a tensor, or of a gradient's slices (see `lookups`)."""
    while isinstance(value, tf.IndexedSlices | tuple):
        value = value.values if isinstance(value, tf.IndexedSlices) else value[0]
    return short_name(value.device)


def _joined(trees: Sequence[Tree], places: Sequence[int]) -> Tree:
    """Joins trees of one shape; `places`: the index of each value in the result, tree by tree."""
    if isinstance(trees[0], tuple):
        left, right = (_joined(halves, places) for halves in zip(*trees, strict=True))
        return left, right
    found = dict(zip(places, itertools.chain.from_iterable(trees), strict=True))
    return [found[place] for place in range(len(places))]
