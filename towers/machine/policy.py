"""Decides, in one place, everything that depends on the kind of device that towers run on.

Towers on GPUs follow `GPU`. If the environment has TOWERS_REHEARSE_GPUS=1, towers on logical CPU
devices follow it, too, which runs the code for GPUs without a GPU.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from towers.machine.devices import is_gpu

REHEARSAL = "TOWERS_REHEARSE_GPUS"


@dataclass(frozen=True)
class Policy:
    """Says how a step uses its devices; the defaults are for CPUs.

    take_turns: a tower waits for the previous tower on its device, so that a device needs the
        memory of one tower. It does not wait for a tower on another device.
    add_on_devices: each addition of the sum runs on the device of its left operand, and one sum
        reaches the parameter device. GPUs and CPUs treat denormal numbers differently, so one sum
        never uses both.
    optimize_graphs: grappler runs, without the optimizations that change bits. It pays on GPUs
        (image layout); on a CPU it made no model faster, and took a third of the first step.
    divide_cores: towers share the CPU's cores; `cpu_threads` computes the threads per operation.
    prefetch_to_devices: each shard is copied to its device while the previous step runs. Devices
        that share one memory need no copy.
    pack_transfers: small values travel between devices as one vector for each dtype.
    shares_memory: nothing moves between the devices; `--plan` counts the bytes as on GPUs.
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
    """Returns `GPU` if any of the devices is a GPU or must behave like one, else `CPU`."""
    return GPU if is_rehearsal() or any(map(is_gpu, devices)) else CPU


def is_rehearsal() -> bool:
    """Returns whether the environment makes logical CPU devices follow the GPUs' policy.

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
