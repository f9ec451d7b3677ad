"""Policy: all that depends on the kind of device that towers run on, decided in one place.

                                    CPU: one memory          GPU: a memory of its own
    towers of one device            side by side, on cores   one after another
    the sum of gradients            made at home, in the     made on the devices that hold them
                                    update's program
    TensorFlow's graph optimizer    off                      on, without its arithmetic
    the cores                       divided among towers     left to TensorFlow
    the next batch's shards         stay where they are      copied ahead of the step
    many small values               have nowhere to go       travel as one vector a dtype

The home is the parameters' device. Towers on GPUs follow `GPU`; TOWERS_REHEARSE_GPUS=1 in the
environment makes those on logical CPU devices follow it, too: the code for GPUs, without one.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from towers.machine.devices import is_gpu

REHEARSAL = "TOWERS_REHEARSE_GPUS"


@dataclass(frozen=True)
class Policy:
    """A step's use of its devices.

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

    take_turns: bool
    add_on_devices: bool
    optimize_graphs: bool
    divide_cores: bool
    prefetch_to_devices: bool
    pack_transfers: bool
    shares_memory: bool


CPU = Policy(
    take_turns=False,
    add_on_devices=False,
    optimize_graphs=False,
    divide_cores=True,
    prefetch_to_devices=False,
    pack_transfers=False,
    shares_memory=True,
)
GPU = Policy(
    take_turns=True,
    add_on_devices=True,
    optimize_graphs=True,
    divide_cores=False,
    prefetch_to_devices=True,
    pack_transfers=True,
    shares_memory=False,
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
