"""The parameters on their device alone: one set of them, sent to all towers once a step."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from towers.machine.devices import short_name
from towers.machine.keras_internals import stored_in
from towers.machine.policy import Policy
from towers.step.averaging import Tree, Values
from towers.step.exchange import Exchange
from towers.step.stages import Stages
from towers.step.transfers import spread
from towers.step.update import update


class ParameterServer:
    """The parameters and the optimizer on their device alone, the home.

    home, optimizer, parameters, exchange: as they were given.
    packed: whether small values travel as one vector a dtype.
    num_bytes, num_copies: what a refresh sends to each copy, and to how many.
    """

    num_bytes, num_copies = 0, 0

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable],
        home: str, policy: Policy, exchange: Exchange,
    ) -> None:
        """
        Args:
            optimizer: built for the parameters. parameters: the V that it updates.
            home: their device.
            policy: how the devices are used.
            exchange: with the other workers.
        """
        self.home, self.packed = home, policy.pack_transfers
        self.optimizer, self.parameters, self.exchange = optimizer, list(parameters), exchange
        self._add_on_devices = policy.add_on_devices
        self._borrowed: dict[int, tf.Variable] = {}  # by id: what is traced keeps none alive

    def spread(self, state: Sequence[Any], devices: Iterable[str]) -> dict[str, list[tf.Tensor]]:
        """The values of the V parameters and of further variables, on each device.

        Every variable is read once, here.
        """
        values = [tf.convert_to_tensor(v.value) for v in [*self.parameters, *state]]
        return spread(values, self.home, devices, packed=self.packed)

    def reduce(self, values: list[Values], devices: Sequence[str]) -> Tree:
        """What is left of the tree of additions over all towers.

        Args:
            values: this worker's towers x V.
            devices: of each of these.
        """
        with tf.device(self.home):
            return self.exchange.reduce(
                values, devices, add_on_devices=self._add_on_devices, home=self.home,
                packed=self.packed,
            )

    def add_up(self, values: list[Values], devices: Sequence[str]) -> Tree:
        """Prepares what `update` takes; values: towers x [loss, V gradients ..., S statistics ...].
        """
        return self.reduce(values, devices)

    def update(self, tree: Tree) -> tuple[tf.Tensor, Values]:
        """Calls the optimizer on what `add_up` has returned; returns (loss, S statistics)."""
        with self.optimizer_at_home():
            return update(tree, self.optimizer, self.parameters)

    def refresh(self) -> None:
        """Lets every device know what others than `update` have assigned."""

    def trust(self, is_trusted: bool) -> None:
        """Whether, until told otherwise, only `update` assigns to parameters and optimizer."""

    @contextmanager
    def optimizer_at_home(self) -> Iterator[None]:
        """Within, the optimizer's variables that lie elsewhere are read and assigned at home.

            before    copy <- variable          the variable may lie on any device
            within    reads and assigns the copy
            after     copy -> variable

        What is made outside of `tf.device` lies on a GPU where there is one: the iterations and the
        learning rate, which an XLA program on /cpu:0 cannot reach. Slots lie beside their
        parameters, wherever they were made: Keras sees to it. The variables stay where they are, as
        callbacks, checkpoints and functions that were traced before know them there. If a parameter
        lies elsewhere too, nothing is copied: no program of one device can update both.
        """
        are_at_home = not self._away(self.parameters)
        away = self._away(self.optimizer.variables) if are_at_home else []
        for variable in away:
            if id(variable) not in self._borrowed:
                with tf.init_scope(), tf.device(self.home):
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
        return [v for v in variables if short_name(v.value.device) != self.home]


class StageServer(ParameterServer):
    """The parameters on the home, for towers whose layers are in stages.

    A device receives, and adds up, what its own stage has.
    """

    def __init__(self, *args: Any, stages: Stages) -> None:
        """
        Args:
            args: as of `ParameterServer`.
            stages: of the model.
        """
        super().__init__(*args)
        self._stages, self._groups = stages, stages.groups
        self._packs_parameters, self.packed = self.packed, False  # sums lie on several devices

    def spread(self, state: Sequence[Any], devices: Iterable[str]) -> dict[str, list[tf.Tensor]]:
        """The values by the first device of each group, each on its stage's device; and at home."""
        variables = [*self.parameters, *state]
        values = [tf.convert_to_tensor(v.value) for v in variables]
        arrived = {first: list(values) for first in [*self._groups, self.home]}
        of_variables = self._stages.of(variables)
        for stage in range(self._stages.num_stages):
            own = [i for i, other in enumerate(of_variables) if other == stage]
            places = [group[stage] for group in self._groups.values()]
            chosen = [values[i] for i in own]
            found = spread(chosen, self.home, places, packed=self._packs_parameters)
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
