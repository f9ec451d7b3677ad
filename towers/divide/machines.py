"""Says where a step runs: brings a model's placement together with the devices and the workers.

placement, devices, workers  -->  Machine  -->  every step: train, test, predict
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import keras
import tensorflow as tf

from towers.divide.copies import Copies, NoCopies, copies_of
from towers.machine.devices import CPU, HOST, Policy, place_towers
from towers.machine.links import try_links
from towers.step.exchange import Exchange
from towers.step.placement import Placement
from towers.step.stages import Stages
from towers.step.xla import FIXED_SHAPES, FullBatch

FullShards: TypeAlias = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]


@dataclass(frozen=True)
class Machine:
    """Says where a step runs.

    devices: the device of each of this worker's towers; with stages, the first device of its group.
    exchange: joins the workers' values.
    home: the parameter device, where whole values are. policy: how devices are used.
    batch_norm: an argument of `TowerStep`.
    full_batch: tells which towers XLA compiles, given T numbers of rows; None: none.
    only_loops: whether XLA compiles only loops over sequences of one length.
    compiles_update: whether XLA compiles the update of large parameters.
    copies: the parameters' copies on the devices.
    stages: the stages of the layers, each on another device of a tower's group; None: one stage.
    """

    devices: Sequence[str]
    exchange: Exchange
    home: str = HOST
    policy: Policy = CPU
    batch_norm: str = "synchronized"
    full_batch: FullShards | None = None
    only_loops: bool = False
    compiles_update: bool = True
    copies: Copies | NoCopies = field(default_factory=NoCopies)
    stages: Stages | None = None

    def __post_init__(self) -> None:
        assert len(self.devices) == len(self.exchange.local_towers), "one device for each tower"
        assert self.stages is None or set(self.devices) <= self.stages.groups.keys()

    def compiling(self, how: bool | str, full_batch: FullBatch, name: str) -> "Machine":
        """Returns the same machine, where XLA compiles what the result of `uses_xla` says.

        name: "train", "test" or "predict", for the full batch of this step.
        """
        if not how:
            return self
        is_full = functools.partial(full_batch.compiled, name)
        return replace(self, full_batch=is_full, only_loops=how == FIXED_SHAPES)


def make_machine(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | None, devices: Sequence[str],
    exchange: Exchange, placement: Placement, policy: Policy, home: str,
) -> Machine:  # fmt: skip
    """Returns the machine of a model's steps, without XLA, after trying its links.

    optimizer: the optimizer, built; None makes no copies. devices: all devices of this worker.

    Raises ValueError if the model cannot be divided into stages or copied, towers_per_device does
    not fit the devices and towers, or a link changes bits or hangs.
    """
    policy = placement.policy_for(policy, home)
    if not policy.shares_memory:
        try_links(tuple(devices), between=placement.add_on == "auto")
    assert len(devices) % placement.gpus_per_tower == 0, "num_groups has checked it"
    firsts = devices[:: placement.gpus_per_tower]
    towers = place_towers(len(exchange.local_towers), firsts, placement.towers_per_device)
    stages = None
    copies: Copies | NoCopies = NoCopies()
    if placement.gpus_per_tower > 1:
        stages = Stages(model, devices, placement.gpus_per_tower, placement.stages)
    if optimizer is not None:
        copies = copies_of(placement, optimizer, model.trainable_variables, towers, policy)
    return Machine(
        towers, exchange, home, policy, placement.batch_norm, copies=copies, stages=stages
    )
