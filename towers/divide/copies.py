"""Keeps a copy of the parameters on every tower device, and says which device updates which.

    mirrored          /gpu:0                    /gpu:1
                     [tower 0]                 [tower 1]
                         |  <-- a slice of the     |
                         |  gradients to each -->  |
                         |  <-- slices' sums -->   |
                     [parameters] <- update    [copy] <- the same update

With "sharded", each device owns some parameters. It keeps their slots of the optimizer, receives
the sums of their gradients, updates them, and sends them to the others.

The first device has the model's own variables. Files, callbacks and metrics use them alone.
"""

import math
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from towers.machine.choices import STRATEGIES
from towers.machine.devices import HOST, Policy, short_name
from towers.machine.keras_internals import store_in, stored_value
from towers.machine.user_lines import warn_user
from towers.step.placement import Placement
from towers.step.transfers import spread


class Copies:
    """Holds copies of the variables that an update changes, on the devices after the first.

    devices: all of them. is_sharded: whether each variable is updated on one device, its owner.
    num_copies: the number of copies of each variable. num_bytes: the bytes that a refresh sends to
    each device.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable],
        devices: Sequence[str], policy: Policy, *, is_sharded: bool = False,
    ) -> None:  # fmt: skip
        """The optimizer is built for the parameters."""
        self.devices, self.num_copies = list(devices), len(devices) - 1
        self.packed, self.num_bytes, self.is_sharded = policy.pack_transfers, 0, is_sharded
        owners = balanced_owners(parameters, len(devices) if is_sharded else 1)
        slots = move_slots(optimizer, parameters, [self.devices[k] for k in owners])
        self._updated = {id(stored_value(v)) for v in [*parameters, *optimizer.variables]}
        self._owner: dict[int, int] = {}  # by variable, the index of the only device that updates
        self._slots: set[int] = set()  # on their owner alone
        if is_sharded:
            self._owner = {id(stored_value(v)): k for v, k in zip(parameters, owners, strict=True)}
            self._owner |= {id(slot): self.devices.index(short_name(slot.device)) for slot in slots}
            self._slots = {id(slot) for slot in slots}
        self._copies: dict[int, tuple[tf.Variable, list[tf.Variable]]] = {}
        with tf.device(HOST):
            self._is_stale = tf.Variable(True, trainable=False, name="stale")
            self._stays_stale = tf.Variable(True, trainable=False, name="stays_stale")
        self._is_trusted = False

    def may_copy(self, variable: tf.Variable) -> bool:
        """Returns whether a variable is a parameter or of the optimizer."""
        return id(variable) in self._updated

    def is_updated_on(self, device_index: int, variable: tf.Variable) -> bool:
        """Returns whether a device updates a variable: its owner, or all devices without one."""
        return self._owner.get(id(variable), device_index) == device_index

    def is_sent(self, variable: tf.Variable) -> bool:
        """Returns whether its owner sends a variable to the other devices: a parameter."""
        return id(variable) in self._owner and not self.is_moved(variable)

    def is_moved(self, variable: tf.Variable) -> bool:
        """Returns whether a variable is on its owner alone."""
        return id(variable) in self._slots

    def has(self, variable: tf.Variable) -> bool:
        """Returns whether a variable has copies."""
        return id(variable) in self._copies

    def of(self, variable: tf.Variable) -> list[tf.Variable]:
        """Returns a variable and its copies, one for each device; makes them if there are none."""
        if self.is_moved(variable):
            return [variable] * len(self.devices)
        if id(variable) not in self._copies:
            copies = []
            for device in self.devices[1:]:
                with tf.init_scope(), tf.device(device):
                    zeros = tf.zeros(variable.shape, variable.dtype)
                    copies.append(tf.Variable(zeros, trainable=False, name=_name(variable)))
            self._copies[id(variable)] = variable, copies
            self.num_bytes += variable.dtype.size * math.prod(variable.shape)
            with tf.init_scope():
                self._is_stale.assign(True)
        return [variable, *self._copies[id(variable)][1]]

    def trust(self, is_trusted: bool) -> None:
        """Sets whether copies stay valid because only steps assign parameters and optimizer."""
        if is_trusted != self._is_trusted:  # because an assignment takes 50 us
            self._is_trusted = is_trusted
            self._stays_stale.assign(not is_trusted)
            self._is_stale.assign(True)  # someone may have assigned before this call

    def mark_stale(self) -> None:
        """Makes the next step refresh all copies."""
        self._is_stale.assign(True)

    def refresh_if_stale(self) -> None:
        """Copies what may have changed since the last step; call it where a step begins."""
        copied = list(self._copies.values())

        def refreshed() -> tf.Tensor:
            values = [variable.read_value() for variable, _ in copied]
            arrived = spread(values, self.devices[0], self.devices[1:], packed=self.packed)
            for i, device in enumerate(self.devices[1:]):
                with tf.device(device):
                    for (_, copies), value in zip(copied, arrived[device], strict=True):
                        copies[i].assign(value, read_value=False)
            self._is_stale.assign(self._stays_stale)
            return tf.zeros([])

        if copied:
            with tf.device(self.devices[0]):
                tf.cond(self._is_stale, refreshed, lambda: tf.zeros([]))


class NoCopies:
    """Stands for `Copies` where the parameters are on one device."""

    num_copies = num_bytes = 0

    def trust(self, is_trusted: bool) -> None:
        """Does nothing: without copies, code between steps may assign to parameters."""

    def refresh_if_stale(self) -> None:
        """Does nothing, like `mark_stale`."""

    mark_stale = refresh_if_stale


def copies_of(
    placement: Placement, optimizer: keras.optimizers.Optimizer,
    parameters: Sequence[keras.Variable], devices: Sequence[str], policy: Policy,
) -> Copies | NoCopies:  # fmt: skip
    """Returns the copies that a placement needs; devices: of each of this worker's towers.

    Devices that share one memory need no copies. Raises ValueError if the parameters are not on the
    first device.
    """
    places = list(dict.fromkeys(devices))
    strategy = STRATEGIES[placement.strategy]
    # A copy saves transfers. Within one memory nothing is transferred.
    if strategy.has_copies and policy.shares_memory:
        warn_user(
            f"strategy={placement.strategy}: these devices share one memory: the parameters stay "
            "where they are, and no copies are made.",
        )
    elif strategy.has_copies:
        _check_home(parameters, places[0], placement.strategy)
        if len(places) > 1:
            has_owners = strategy.has_owners
            return Copies(optimizer, parameters, places, policy, is_sharded=has_owners)
    move_slots(optimizer, parameters, [short_name(v.value.device) for v in parameters])
    return NoCopies()


def _check_home(parameters: Sequence[keras.Variable], first: str, strategy: str) -> None:
    """Raises ValueError if a parameter is not on the first device."""
    # The model's own variables, which files and callbacks read, are the first device's copy.
    for variable in parameters:
        device = short_name(variable.value.device)
        if device != first:
            raise ValueError(
                f"strategy={strategy}: {variable.path} is on {device}, and the model's own "
                f"variables are the copy of the first device, {first}. Make the model under "
                f"tf.device({first!r}), or use strategy=parameter_server."
            )


def balanced_owners(parameters: Sequence[keras.Variable], count: int) -> list[int]:
    """Returns an owner, 0 ... count - 1, of each parameter: the largest first, to the emptiest."""
    sizes = [math.prod(v.shape) for v in parameters]
    loads, owners = [0] * count, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    assert max(loads) - min(loads) <= max(sizes, default=0), "the largest parameter is the surplus"
    return owners


def move_slots(
    optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable],
    devices: Sequence[str],
) -> list[tf.Variable]:  # fmt: skip
    """Moves the slots of each parameter to its device; returns all slots, as they are stored.

    Keras tells the parameter of a slot by its name alone.
    """
    by_name = {v.path.replace("/", "_"): d for v, d in zip(parameters, devices, strict=True)}
    slots = []
    for slot in optimizer.variables:
        device = _device_of(slot.name, by_name)
        if device is None:
            continue
        old = stored_value(slot)
        assert old is not None  # the optimizer is built
        if short_name(old.device) != device:
            with tf.init_scope(), tf.device(device):
                store_in(slot, tf.Variable(old, trainable=False, name=_name(old)))
            # Frees the memory. Graphs that were traced before would update it; the shape stops
            # them.
            tf.raw_ops.AssignVariableOp(resource=old.handle, value=tf.zeros([0], old.dtype))
        slots.append(stored_value(slot))
    return slots


def _device_of(slot: str, by_name: Mapping[str, str]) -> str | None:
    """Returns the device of the parameter whose name begins a slot's name; None without one."""
    parts = slot.split("_")
    names = ("_".join(parts[:i]) for i in range(len(parts), 0, -1))
    return next((by_name[name] for name in names if name in by_name), None)


def _name(variable: tf.Variable) -> str:
    return variable.name.split(":")[0]
