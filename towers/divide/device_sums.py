"""Adds the towers' parts of sums on the devices that update with them, instead of at one place."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from towers.divide.facts import OWN, WHOLE, Value
from towers.divide.run import Run
from towers.machine.devices import CPU
from towers.step.averaging import Tree, add_subtrees, add_tree, partial_sums, subtrees
from towers.step.transfers import pack, packages, spread, unpack


def sums_on(run: Run, target: str, values: Sequence[Value]) -> dict[Value, tf.Tensor]:
    """Returns the sums of parts on one device, which alone needs them."""
    parts, others = _parts(run, values)
    machine = run.machine
    moved: dict[range, list[tf.Tensor]] = {}
    for source, towers in _subtrees(run):
        with tf.device(source):
            added = add_tree(_added(parts, source, towers))
        packed = machine.policy.pack_transfers
        moved[towers] = spread(added, source, [target], packed=packed)[target]
    sums = {}
    with tf.device(target):
        for i, value in enumerate(parts):
            sums[value] = add_subtrees(
                {towers: of[i] for towers, of in moved.items()}, machine.exchange.local_towers
            )
    whole = [run.whole.read(value, WHOLE) for value in others]
    arrived = spread(whole, machine.home, [target], packed=machine.policy.pack_transfers)[target]
    return sums | dict(zip(others, arrived, strict=True))


def sums_everywhere(
    run: Run, devices: Sequence[str], values: Sequence[Value]
) -> list[dict[Value, tf.Tensor]]:
    """Returns the sums of parts on each device: each adds one slice, and sends it to the others."""
    parts, others = _parts(run, values)
    count, packed = len(devices), run.machine.policy.pack_transfers
    first = [of[0] for of in parts.values()]
    sums: list[dict[Value, tf.Tensor]] = [{} for _ in devices]
    for chosen, shapes in packages(first):
        names = [list(parts)[i] for i in chosen]
        moved: dict[range, list[tf.Tensor]] = {}
        for source, towers in _subtrees(run):
            with tf.device(source):
                added = add_tree(_added({v: parts[v] for v in names}, source, towers))
                moved[towers] = tf.split(pack(added, count), count)
        # Each device adds one slice of the vector, so that no device adds all.
        slices = []
        for k, device in enumerate(devices):
            with tf.device(device):
                own = {towers: of[k] for towers, of in moved.items()}
                slices.append(add_subtrees(own, run.machine.exchange.local_towers))
        # Each device then receives the sums of the other slices.
        for k, device in enumerate(devices):
            with tf.device(device):
                sums[k].update(zip(names, unpack(tf.concat(slices, axis=0), shapes)))
    whole = [run.whole.read(value, WHOLE) for value in others]
    arrived = spread(whole, run.machine.home, devices, packed=packed)
    for k, device in enumerate(devices):
        sums[k].update(zip(others, arrived[device], strict=True))
    return sums


def _subtrees(run: Run) -> list[tuple[str, range]]:
    """Returns (device, towers) of each subtree of the additions that one device makes."""
    devices = list(dict.fromkeys(run.machine.devices))
    owners = [devices.index(device) for device in run.machine.devices]
    return [(devices[owner], towers) for owner, towers in subtrees(owners)]


def _added(parts: Mapping[Value, Sequence[tf.Tensor]], device: str, towers: range) -> Tree:
    values = [[of[t] for of in parts.values()] for t in towers]
    return partial_sums(values, [device] * len(values), CPU)  # left to the caller's device


def _parts(run: Run, values: Sequence[Value]) -> tuple[dict[Value, list[tf.Tensor]], list[Value]]:
    """Returns the towers' parts of those sums that devices can add, and the other values.

    Workers add theirs on the parameter device, and so do all if the size changes by the batch.
    """
    parts, others = {}, []
    for value in values:
        if run.machine.exchange.is_alone and value.shape.num_elements():
            parts[value] = run.values_for(value, OWN)
        else:
            others.append(value)
    return parts, others
