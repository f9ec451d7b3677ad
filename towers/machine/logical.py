"""Splits the machine's devices into logical ones, before TensorFlow starts.

the CPU   ->  /cpu:0 ... /cpu:7     to simulate GPUs, and to run towers side by side
the GPUs  ->  /gpu:0 ... /gpu:7     to simulate more GPUs, with real kernels and copies
"""

import os
from collections.abc import Sequence
from itertools import pairwise

import tensorflow as tf

from towers.machine import nvidia
from towers.machine.devices import (
    FIRST,
    HOST,
    count_cores,
    cpu_threads,
    has_gpus,
    has_started,
    policy_of,
)
from towers.machine.tensorflow_internals import OWN_THREADS
from towers.machine.words import counted
from towers.workers import workers

# TensorFlow leaves 1,800 MiB of a GPU to CUDA's context, cuBLAS and cuDNN (MinSystemMemory in its
# gpu_device.cc), but none of a divided GPU. The streams of each logical GPU need memory, too.
_RESERVED_MIB = 2048
# The workspaces of cuBLAS and cuDNN for one tower need almost as much; with less, models fail.
_LEAST_MIB = 512

_set_here: list[int] = []  # the intra- and inter-op threads that `logical_cpus` set last


def logical_cpus(count: int, *, num_towers: int | None = None, set_threads: bool = True) -> None:
    """Splits the CPU into logical devices, /cpu:0, /cpu:1 and so on, which simulate GPUs.

    It also gives each device as many threads as train.py does: this makes towers faster, and
    results bit-identical to train.py's. Numbers that you have set with tf.config.threading before
    stay. If TensorFlow has started with `count` devices, nothing changes.

    Args:
        count: the number of logical devices, at least 1.
        num_towers: the number of towers to come. Default: one for each device of each worker.
        set_threads: whether to set TensorFlow's threads.

    Raises:
        ValueError: `count` or `num_towers` is below 1, or TensorFlow has already started with
            another count.
    """
    cluster = workers.join_workers()
    for name, value in (("count", count), ("num_towers", num_towers)):
        if value is not None and value < 1:
            raise ValueError(f"logical_cpus: {name} ({value}) must be at least 1.")
    if has_started():
        present = len(tf.config.list_logical_devices("CPU"))
        if present != count:
            raise ValueError(
                f"logical_cpus: TensorFlow has already started with {present} CPU device(s). "
                f"Call towers.logical_cpus({count}) {FIRST}."
            )
        return
    cpu, logical = tf.config.list_physical_devices("CPU")[0], tf.config.LogicalDeviceConfiguration
    tf.config.set_logical_device_configuration(cpu, [logical() for _ in range(count)])
    if set_threads and policy_of([HOST]).divide_cores:
        threading = tf.config.threading
        intra, inter = cpu_threads(num_towers or count * cluster.num_workers)
        get = threading.get_intra_op_parallelism_threads, threading.get_inter_op_parallelism_threads
        chosen = [number() for number in get]
        if chosen != _set_here:  # 0: not chosen
            intra, inter = chosen[0] or intra, chosen[1] or inter
        threading.set_intra_op_parallelism_threads(intra)
        threading.set_inter_op_parallelism_threads(inter)
        _set_here[:] = intra, inter
        os.environ[OWN_THREADS] = "true"


def is_undivided() -> bool:
    """Returns whether there is no GPU and the CPU is not divided into logical devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    return not has_gpus() and tf.config.get_logical_device_configuration(cpu) is None


def undivided_cpu(num_towers: int, is_chosen: bool = True) -> str | None:
    """Returns the warning that this process' towers share an undivided CPU by mistake, or None."""
    count = num_towers if num_towers > 1 else count_cores()
    if not is_undivided() or num_towers < 2 and (is_chosen or count < 2):
        return None
    which = "there is one tower, on" if num_towers < 2 else f"all {num_towers} towers share"
    return (
        f"{which} {HOST}: this machine has no GPU, and TensorFlow had started with one CPU device, "
        f"such as for a model that was made before. The results are the same. For {count} devices, "
        f"call towers.logical_cpus({count}) {FIRST}. For one device without this warning, pass "
        "num_towers=1."
    )


def logical_gpus(count: int, *, memory_mib: int | None = None) -> None:
    """Divides the GPUs into logical ones, /gpu:0, /gpu:1 and so on, of equal memory.

    One GPU then simulates several, with real kernels and copies, but not with their speed. If there
    are `count` already, nothing changes.

    Args:
        count: the number of logical GPUs, at least one for each GPU. GPUs share it as evenly as
            possible, in order.
        memory_mib: the memory of each logical GPU in MiB. Default: the free memory that nvidia-smi
            reports, less a reserve, divided among them.

    Raises:
        ValueError: there is no GPU, there are more than `count`, their memory is unknown or too
            small, or TensorFlow has already started with another count.
    """
    for name, value in (("logical_gpus", count), ("memory_mib", memory_mib)):
        if value is not None and value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1.")
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        raise ValueError(
            f"logical_gpus ({count}): TensorFlow sees no GPU on this machine. Leave it out to run "
            f"towers on logical CPU devices; in Python, towers.logical_cpus({count}) makes them."
        )
    present = sum(max(1, len(limits)) for limits in _limits_mib())
    is_late = has_started()
    if is_late and present != count:
        raise ValueError(
            f"logical_gpus ({count}): TensorFlow has already started with {present} GPU(s). Call "
            f"towers.logical_gpus({count}) {FIRST}."
        )
    if is_late or present == count and memory_mib is None:
        return
    if count < len(gpus):
        raise ValueError(
            f"logical_gpus ({count}) is less than this machine's GPUs: {len(gpus)}. Ask for at "
            f"least {len(gpus)}, or hide GPUs with CUDA_VISIBLE_DEVICES."
        )
    ends = [count * i // len(gpus) for i in range(len(gpus) + 1)]
    shares = [end - begin for begin, end in pairwise(ends)]
    memory_mib = memory_mib or _memory_of_each(shares)
    for gpu, share in zip(gpus, shares, strict=True):
        limits = [tf.config.LogicalDeviceConfiguration(memory_mib) for _ in range(share)]
        tf.config.set_logical_device_configuration(gpu, limits)


def _memory_of_each(shares: Sequence[int]) -> int:
    """Returns MiB for each logical GPU: (least free memory - a reserve) // the largest share."""
    # nvidia-smi and TensorFlow may order GPUs differently, so no share can be matched to its GPU.
    gpus = nvidia.driver_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or []
    free = [gpu.free_memory for gpu in gpus if gpu.free_memory is not None]
    if not free or len(free) < len(gpus):
        raise ValueError(
            "logical_gpus: nvidia-smi does not show how much memory is free on the GPUs. Say in "
            "Python how much each gets, such as towers.logical_gpus(8, memory_mib=4096)."
        )
    usable = max(0, min(free) - _RESERVED_MIB)
    memory = usable // max(shares)
    if memory < _LEAST_MIB:
        most = usable // _LEAST_MIB * len(shares)
        remedy = f"Ask for {most}" if most >= len(shares) else "End what else uses the GPU"
        raise ValueError(
            f"logical_gpus ({sum(shares)}) is too many for the memory: {memory:,} MiB each, and "
            f"less than {_LEAST_MIB} hold no training; {most} would fit. {remedy}, or leave it out."
        )
    return memory


def shared_gpus() -> str | None:
    """Returns a run's note on logical GPUs; None if each GPU is one device."""
    limits = _limits_mib()
    count = sum(map(len, limits))
    if count <= len(limits):
        return None
    gpus = f"{counted(len(limits), 'GPU')}, {limits[0][0]:,} MiB each"
    return f"{count} logical GPUs on {gpus}: real kernels and copies, not the speed of {count}"


def _limits_mib() -> list[list[int]]:
    """Returns, for each GPU, its logical GPUs' memory in MiB; [] if it is not divided."""
    gpus = tf.config.get_visible_devices("GPU")
    found = [tf.config.get_logical_device_configuration(gpu) or [] for gpu in gpus]
    return [[logical.memory_limit for logical in limits] for limits in found]
