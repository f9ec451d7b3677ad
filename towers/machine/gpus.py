"""The GPUs that are asked for: a count or a list of indices -> device names; the others hidden.

TensorFlow takes the memory of every GPU that it sees as it starts.
"""

import operator
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from towers.machine.devices import (
    FIRST,
    count_cores,
    device_names,
    has_gpus,
    has_started,
    is_gpu,
)
from towers.machine.logical import is_undivided, logical_cpus
from towers.machine.words import counted
from towers.workers.workers import join_workers

_TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"


def gpu_devices(
    gpus: Any, num_towers: int | None = None, gpus_per_tower: int = 1
) -> list[str]:
    """The devices that `gpus` stands for; logical CPU devices on a machine without GPUs.

    Args:
        gpus: a count, or a list of distinct device indices such as [0, 2, 4]; None means all GPUs,
            or without one the logical CPU devices: one for each core and tower if none are made.
        num_towers: of all workers, which logical CPU devices get their threads by; None means one
            for each `gpus_per_tower` devices.

    Returns:
        Device names such as ["/gpu:0", "/gpu:2"], in the order asked for; where the GPUs between
        could be hidden, see `use_only`, ["/gpu:0", "/gpu:1"]. On a machine without GPUs where
        TensorFlow has started with one CPU device, it is that device alone.

    Raises:
        ValueError: `gpus` is neither, or names devices that this machine does not have.
    """
    kind = "gpu" if has_gpus() else "cpu"
    if gpus is None:
        gpus = _all_there_are(kind, num_towers, gpus_per_tower)
    indices = device_indices(gpus)
    if kind == "cpu":
        groups = max(1, len(indices) // gpus_per_tower)
        towers = num_towers or groups * join_workers().num_workers
        _make_logical_cpus(max(indices) + 1, towers)
    else:
        use_only(indices)
        if as_integer(gpus) is None:
            indices = _numbers_now(gpus, indices)
    present = device_names(kind)
    if gpus_per_tower == 1 and is_undivided():
        return present
    if max(indices) >= len(present):
        raise ValueError(_too_many(gpus, indices, kind, present))
    return [present[i] for i in indices]


def _all_there_are(kind: str, num_towers: int | None, gpus_per_tower: int) -> int:
    """The number of devices where the caller names none."""
    if kind == "gpu" or has_started() or not is_undivided():
        return len(device_names(kind))
    return cpu_devices(num_towers, gpus_per_tower)


def cpu_devices(num_towers: int | None, gpus_per_tower: int) -> int:
    """The logical CPU devices to make: one for each tower's stage, at most one a core.

    Args:
        num_towers: the number of towers of all workers; None means as many as fit.
        gpus_per_tower: the number of stages.
    """
    cores = count_cores()
    towers = cores if num_towers is None else join_workers().most_towers(num_towers)
    return gpus_per_tower * max(1, min(cores // gpus_per_tower, towers))


# The numbers that the GPUs had which `use_only` has left; empty while it has hidden none.
shown: list[int] = []


def use_only(indices: Sequence[int]) -> None:
    """Hides all other GPUs from TensorFlow, which then leaves their memory alone.

    Those that are left get new numbers, from 0. Where TensorFlow has started, it only warns. GPUs
    that are divided into logical ones stay, and so do all where an index is of none.

    Args:
        indices: distinct, of the GPUs that TensorFlow sees.
    """
    visible = tf.config.get_visible_devices("GPU")
    used = sorted(indices)
    others = [i for i in range(len(visible)) if i not in indices]
    if not others or shown or used[-1] >= len(visible):
        return
    if any(tf.config.get_logical_device_configuration(gpu) for gpu in visible):
        return
    if not has_started():
        tf.config.set_visible_devices([visible[i] for i in used], "GPU")
        shown[:] = used
        return
    names = ", ".join(f"/gpu:{i}" for i in others)
    warnings.warn(
        f"TensorFlow has started, and keeps the memory of {names}, which nothing here uses. "
        f"CUDA_VISIBLE_DEVICES={','.join(map(str, used))} leaves it to others.", stacklevel=3,
    )


def _numbers_now(gpus: Any, indices: Sequence[int]) -> list[int]:
    """The numbers that GPUs have since `use_only` has hidden others."""
    hidden = [i for i in indices if shown and i not in shown]
    if hidden:
        raise ValueError(
            f"gpus ({gpus!r}): an earlier call has hidden all but {shown} from TensorFlow. Name "
            "in the first call all that are to be used, or begin a new process."
        )
    return [shown.index(i) for i in indices] if shown else list(indices)


def multiplies_in_tf32(devices: Sequence[str]) -> bool:
    """Whether float32 matmuls and convolutions on any of the devices multiply in TF32.

    GPUs do from compute capability 8.0 on (NVIDIA's A100 whitepaper), unless TensorFlow, or
    NVIDIA's libraries by NVIDIA_TF32_OVERRIDE=0, are told not to.
    """
    is_on = tf.config.experimental.tensor_float_32_execution_enabled()
    if not any(map(is_gpu, devices)) or not is_on or os.environ.get(_TF32_OVERRIDE) == "0":
        return False
    found = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return any(details.get("compute_capability", (0, 0)) >= (8, 0) for details in found)


def as_integer(value: Any) -> int | None:
    """A Python or NumPy integer as int; None for anything else, True and False too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def device_indices(gpus: Any) -> list[int]:
    """The indices of the devices that `gpus` stands for: 0, 1, ... of a count.

    Raises:
        ValueError: `gpus` is neither a count nor a list of distinct indices.
    """
    count = as_integer(gpus)
    if count is not None:
        if count < 1:
            raise _malformed(gpus)
        return list(range(count))
    if isinstance(gpus, (str, bytes)) or not isinstance(gpus, Iterable):
        raise _malformed(gpus)
    indices = [as_integer(value) for value in gpus]
    valid = [i for i in indices if i is not None and i >= 0]
    if not valid or len(set(valid)) < len(indices):
        raise _malformed(gpus)
    return valid


def _malformed(gpus: Any) -> ValueError:
    # Physical devices: an error about the argument must not start TensorFlow.
    count = len(tf.config.list_physical_devices("GPU"))
    names = f" ({', '.join(f'/gpu:{i}' for i in range(count))})" if count else ""
    return ValueError(
        f"gpus ({gpus!r}) must be a count of at least 1, or a list of distinct device indices from "
        f"0, such as gpus=2 or gpus=[0, 1]. This machine has {counted(count, 'GPU')}{names}"
        + ("." if count else "; towers then run on logical CPU devices.")
    )


def _too_many(gpus: Any, indices: list[int], kind: str, present: list[str]) -> str:
    asked, count = len(indices), len(present)
    instead = f"gpus={count}, or gpus={count}, num_towers={asked}"
    if kind == "gpu":
        return (
            f"gpus ({gpus!r}) is more than this machine has: {count} ({', '.join(present)}). "
            f"Use {instead}."
        )
    return (
        f"gpus ({gpus!r}) is more than this machine has: no GPU, and "
        f"{counted(count, 'logical CPU device')} ({', '.join(present)}). Call "
        f"towers.logical_cpus({max(indices) + 1}) {FIRST}, or use {instead}."
    )


def _make_logical_cpus(count: int, num_towers: int) -> None:
    """Makes the logical CPU devices, where there are fewer and TensorFlow has not started."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or [cpu]) < count:
        try:
            logical_cpus(count, num_towers=num_towers)
        except ValueError:
            pass  # too late: the caller's error says what there is
