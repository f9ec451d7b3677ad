"""Policy: all that depends on the kind of device that towers run on, decided in one place.

Towers on GPUs follow `GPU`; TOWERS_REHEARSE_GPUS=1 in the environment makes those on logical CPU
devices follow it, too: the code for GPUs, without one.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from towers.machine.devices import is_gpu

REHEARSAL = "TOWERS_REHEARSE_GPUS"


@dataclass(frozen=True)
class Policy:
    """A step's use of its devices; the defaults are those for CPUs.

    take_turns: a tower waits for the one before it on the same device, so that a device needs the
        memory of one tower; never for a tower on another device.
    add_on_devices: each addition of the sum is made on the device of its left child, and one sum
        reaches the parameters' device; never a part on GPUs and a part on the CPU, which treat
        denormal numbers differently.
    optimize_graphs: let grappler work, but for its arithmetic optimization. It pays on GPUs (the
        layout of images); on a CPU it made no model faster, and took a third of the first step.
    divide_cores: one thread a tower inside each operation, as far as cores go round.
    prefetch_to_devices: copy each shard to its device while the step before runs. In one memory a
        copy has nowhere to go.
    pack_transfers: small values travel between devices as one vector a dtype.
    shares_memory: nothing moves between the devices: `--plan` counts what GPUs would move.
    """

    take_turns: bool = False
    add_on_devices: bool = False
    optimize_graphs: bool = False
    divide_cores: bool = True
    prefetch_to_devices: bool = False
    pack_transfers: bool = False
    shares_memory: bool = True


CPU = Policy()
GPU = Policy(
    take_turns=True, add_on_devices=True, optimize_graphs=True, divide_cores=False,
    prefetch_to_devices=True, pack_transfers=True, shares_memory=False,
)


def policy_of(devices: Sequence[str]) -> Policy:
    """`GPU` where any of the devices is one, or is to behave like one; else `CPU`."""
    return GPU if is_rehearsal() or any(map(is_gpu, devices)) else CPU


def is_rehearsal() -> bool:
    """Whether the environment asks logical CPU devices to follow the GPUs' policy.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(REHEARSAL, "") or "0"
    if value not in ("0", "1"):
        raise ValueError(
            f"{REHEARSAL} ({value!r}) must be 1, for logical CPU devices that follow the GPUs' "
            "policy, or 0."
        )
    return value == "1"
