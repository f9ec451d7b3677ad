"""Turns a count or a list of GPU indices into device names, and hides the other GPUs."""

import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from towers.machine.devices import (
    count_cores,
    device_kind,
    device_names,
    has_started,
    is_gpu,
    too_many,
)
from towers.machine.logical import is_undivided, logical_cpus
from towers.machine.user_lines import warn_user
from towers.machine.words import counted
from towers.workers.workers import join_workers


def gpu_devices(
    gpus: int | Sequence[int] | None,
    num_towers: int | None = None,
    gpus_per_tower: int = 1,
    *,
    device: str = "auto",
    name: str = "gpus",
    may_share: bool = True,
) -> list[str]:
    """Returns the devices that `gpus` stands for; logical CPU devices if there is no GPU.

    gpus: a count, a list of device indices such as [0, 2], or None for all devices.
    num_towers: the towers of all workers; None means one for each `gpus_per_tower` devices.
    name: the name of the argument `gpus` in errors.
    may_share: whether one undivided CPU device may stand for all devices.
    """
    kind, indices = device_kind(device), None if gpus is None else device_indices(gpus)
    if kind == "cpu":
        _split_cpu(indices, num_towers, gpus_per_tower)
    elif indices is not None:
        indices = _use_only(indices, gpus)
    present = device_names(kind)
    if indices is None or may_share and gpus_per_tower == 1 and is_undivided():
        return present
    if max(indices) >= len(present):
        raise too_many(name, gpus, indices, present)
    return [present[i] for i in indices]


def _split_cpu(indices: Sequence[int] | None, num_towers: int | None, gpus_per_tower: int) -> None:
    """Makes logical CPU devices if there are too few and TensorFlow has not started."""
    cluster, cpu = join_workers(), tf.config.list_physical_devices("CPU")[0]
    divided = tf.config.get_logical_device_configuration(cpu)
    if has_started() or divided is not None and len(divided) > max(indices or [0]):
        return
    if indices:
        count, groups = max(indices) + 1, max(1, len(indices) // gpus_per_tower)
    else:  # one for each stage of each tower, at most one per core
        cores = count_cores()
        most = cores if num_towers is None else cluster.most_towers(num_towers)
        groups = max(1, min(cores // gpus_per_tower, most))
        count = gpus_per_tower * groups
    logical_cpus(count, num_towers=num_towers or groups * cluster.num_workers)


# The original indices of the GPUs that `_use_only` left visible; empty if it has hidden none.
shown: list[int] = []


def _use_only(indices: Sequence[int], gpus: object) -> list[int]:
    """Hides the other GPUs, whose memory TensorFlow would take; returns these GPUs' new indices."""
    visible, used = tf.config.get_visible_devices("GPU"), sorted(indices)
    others = [i for i in range(len(visible)) if i not in indices]
    is_divided = any(tf.config.get_logical_device_configuration(gpu) for gpu in visible)
    if others and used[-1] < len(visible) and not shown and not is_divided:
        if has_started():
            names = ", ".join(f"/gpu:{i}" for i in others)
            warn_user(
                f"TensorFlow has started, and keeps the memory of {names}, which nothing here "
                f"uses. CUDA_VISIBLE_DEVICES={','.join(map(str, used))} leaves it to others.",
            )
        else:
            tf.config.set_visible_devices([visible[i] for i in used], "GPU")
            shown[:] = used
    if not shown or as_integer(gpus) is not None:  # a count counts the visible GPUs
        return list(indices)
    if not set(indices) <= set(shown):
        raise ValueError(
            f"gpus ({gpus!r}): an earlier call has hidden all but {shown} from TensorFlow. Name "
            "in the first call all that are to be used, or begin a new process."
        )
    return [shown.index(i) for i in indices]


def multiplies_in_tf32(devices: Sequence[str]) -> bool:
    """Returns whether float32 matmuls and convolutions on any of the devices multiply in TF32."""
    # GPUs of compute capability 8.0 or higher do (NVIDIA's A100 whitepaper), unless it is off.
    is_on = tf.config.experimental.tensor_float_32_execution_enabled()
    if not any(map(is_gpu, devices)) or not is_on or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return False
    found = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return any(details.get("compute_capability", (0, 0)) >= (8, 0) for details in found)


def as_integer(value: Any) -> int | None:
    """Returns a Python or NumPy integer as int; None for all else, such as True and False."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def device_indices(gpus: object) -> list[int]:
    """Returns the device indices that `gpus` stands for; a count means 0 to count - 1."""
    count = as_integer(gpus)
    given = gpus if count is None else range(count)
    indices = [as_integer(value) for value in given] if isinstance(given, Iterable) else []
    valid = [i for i in indices if i is not None and i >= 0]
    if valid and len(set(valid)) == len(indices):
        return valid
    present = len(tf.config.list_physical_devices("GPU"))  # which does not start TensorFlow
    raise ValueError(
        f"gpus ({gpus!r}) must be a count of at least 1, or a list of distinct device indices from "
        f"0, such as gpus=2 or gpus=[0, 1]. This machine has {counted(present, 'GPU')}."
    )
