"""Says where the parameters, the layers and the statistics of a model are, and what goes together.

parameters   strategy                 on one device, or a copy on each
layers       gpus_per_tower, stages   on one device, or in stages on several
towers       towers_per_device        as many on each device, or more on a faster one
sums         add_on                   on the devices, or on the CPU alone
statistics   batch_norm               of the whole batch, or of each tower's rows
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from towers.machine import choices
from towers.machine.devices import Policy, is_gpu
from towers.machine.gpus import as_integer
from towers.step.checks import check_choice


@dataclass(frozen=True)
class Placement:
    """Holds arguments of `TowerStep` that say where a model is; raises ValueError if one is wrong.

    No device is known yet, so that flags can be checked before TensorFlow starts.
    """

    strategy: str = "parameter_server"
    gpus_per_tower: int = 1
    stages: Sequence[str] | None = None
    batch_norm: str = "synchronized"
    towers_per_device: Sequence[int] | None = None
    add_on: str = "auto"

    def __post_init__(self) -> None:
        check_choice("batch_norm", self.batch_norm, choices.BATCH_NORM)
        if self.strategy == choices.ASYNC:
            raise ValueError(choices.ASYNC_REFUSED)
        check_choice("strategy", self.strategy, tuple(choices.STRATEGIES))
        self._check_stages()
        counts = self.towers_per_device
        if counts is not None and (
            isinstance(counts, str) or not counts or any((as_integer(n) or 0) < 1 for n in counts)
        ):
            raise ValueError(
                f"towers_per_device ({counts!r}) must be a list with the number of towers on each "
                "device, each at least 1, such as [3, 1]."
            )
        reason = choices.STRATEGIES[self.strategy].refuses_stages
        if self.gpus_per_tower > 1 and reason:
            raise ValueError(
                f"gpus_per_tower ({self.gpus_per_tower}) does not go with "
                f"strategy={self.strategy}: {reason}"
            )
        check_choice("add_on", self.add_on, choices.ADD_ON)
        if self.add_on == "cpu" and choices.STRATEGIES[self.strategy].has_copies:
            raise ValueError(
                f"add_on=cpu does not go with strategy={self.strategy}, which sends sums from "
                "device to device. Use strategy=parameter_server."
            )
        if self.add_on == "cpu" and self.gpus_per_tower > 1:
            raise ValueError(
                f"add_on=cpu does not go with gpus_per_tower ({self.gpus_per_tower}): stages send "
                "outputs from device to device. Use gpus_per_tower=1."
            )

    def _check_stages(self) -> None:
        count, stages = self.gpus_per_tower, self.stages
        if (as_integer(count) or 0) < 1:
            raise ValueError(f"gpus_per_tower ({count!r}) must be an integer of at least 1.")
        if isinstance(stages, str) or not all(isinstance(name, str) for name in stages or ()):
            raise ValueError(f"stages ({stages!r}) must be a list of layers' names.")
        if stages is not None and len(stages) != count - 1:
            raise ValueError(
                f"stages ({', '.join(stages)}) must name {count - 1} layers, which begin the "
                f"second and later stages. Give other names, or gpus_per_tower={len(stages) + 1}."
            )

    def check_jit_compile(self, jit_compile: bool | str) -> None:
        """Raises ValueError if XLA must compile layers that are on several devices."""
        if self.gpus_per_tower > 1 and jit_compile is True:
            raise ValueError(
                f"gpus_per_tower ({self.gpus_per_tower}) does not go with jit_compile=True: XLA "
                "would compile each stage separately, which changes the bits. Use "
                "jit_compile=False."
            )

    def num_groups(self, num_devices: int) -> int:
        """Returns how many groups of devices run towers, each tower on one group.

        Raises ValueError if `gpus_per_tower` does not divide the number of a worker's devices.
        """
        if rest := num_devices % self.gpus_per_tower:
            raise ValueError(
                f"gpus_per_tower ({self.gpus_per_tower}) must divide the number of devices, which "
                f"is {num_devices}: use {num_devices - rest or self.gpus_per_tower} devices."
            )
        return num_devices // self.gpus_per_tower

    def num_towers(self, num_groups: int) -> int:
        """Returns the default number of a worker's towers, on so many groups of devices."""
        if self.towers_per_device is None:
            return num_groups
        return sum(self.towers_per_device)

    def policy_for(self, policy: Policy, home: str) -> Policy:
        """Returns the policy that adds where `add_on` says, with the parameters on `home`.

        Raises ValueError if the parameters are on a GPU, which would add.
        """
        if self.add_on == "auto":
            return policy
        if is_gpu(home):
            raise ValueError(
                f"add_on=cpu: the parameters are on {home}, which other devices would send to. Use "
                "variable_device=cpu; in a script, make the model under tf.device('/cpu:0')."
            )
        return replace(policy, add_on_devices=False)

    def makes_copies(self, policy: Policy) -> bool:
        """Returns whether devices get copies of the parameters; with one memory, they need none."""
        return choices.STRATEGIES[self.strategy].has_copies and not policy.shares_memory
