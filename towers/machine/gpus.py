"""The `gpus` argument of `make_parallel`: a count or a list of indices -> device names."""

import operator
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from towers.machine.devices import FIRST, device_names, has_gpus
from towers.machine.logical import logical_cpus
from towers.machine.workers import join_workers


def gpu_devices(gpus: Any, num_towers: int | None = None) -> list[str]:
    """The devices that `gpus` stands for; logical CPU devices on a machine without GPUs.

    Args:
        gpus: a count, or a list of distinct device indices such as [0, 2, 4].
        num_towers: of all workers, which logical CPU devices get their threads by; None means one
            for each device.

    Returns:
        Device names such as ["/gpu:0", "/gpu:2"], in the order asked for.

    Raises:
        ValueError: `gpus` is neither, or names devices that this machine does not have.
    """
    indices = _indices(gpus)
    kind = "gpu" if has_gpus() else "cpu"
    if kind == "cpu":
        towers = num_towers or len(indices) * join_workers().num_workers
        _make_logical_cpus(max(indices) + 1, towers)
    present = device_names(kind)
    if max(indices) >= len(present):
        raise ValueError(_too_many(gpus, indices, kind, present))
    return [present[i] for i in indices]


def as_integer(value: Any) -> int | None:
    """A Python or NumPy integer as int; None for anything else, True and False too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _indices(gpus: Any) -> list[int]:
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
        f"0, such as gpus=2 or gpus=[0, 1]. This machine has {count} GPUs{names}"
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
        f"gpus ({gpus!r}) is more than this machine has: no GPU, and {count} logical CPU devices "
        f"({', '.join(present)}). Call towers.logical_cpus({max(indices) + 1}) {FIRST}, or use "
        f"{instead}."
    )


def _make_logical_cpus(count: int, num_towers: int) -> None:
    """Makes the logical CPU devices, where there are fewer and TensorFlow has not started."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or [cpu]) < count:
        try:
            logical_cpus(count, num_towers=num_towers)
        except ValueError:
            pass  # too late: the caller's error says what there is
