"""Lists the devices of this machine, assigns each tower to one, and decides how towers use them.

tower 0 ... tower T-1   ->   device 0 ... device D-1      tower t runs on device t * D // T
"""

import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import tensorflow as tf

from towers.machine.argument_names import names_checked
from towers.machine.words import plural

HOST = "/cpu:0"  # its memory holds the global batches
# A notebook cell that makes a model starts TensorFlow; after that, no devices can be made.
FIRST = "before anything else uses TensorFlow (in a notebook: restart the kernel, call it first)"


def has_gpus() -> bool:
    """Returns whether TensorFlow sees a GPU, without starting its runtime."""
    return bool(tf.config.list_physical_devices("GPU"))


@names_checked
def tower_devices(num_gpus: int | None = None, device: str = "auto") -> list[str]:
    """Returns the devices that towers run on, in order, such as ["/gpu:0", "/gpu:1"].

    Args:
        num_gpus: the number of devices. Default: all.
        device: "gpu", "cpu" for logical CPU devices, or "auto", which takes GPUs if there are any.

    Raises:
        ValueError: there are fewer devices, or an argument is wrong.
    """
    present = device_names(device_kind(device))
    if num_gpus is None:
        return present
    if num_gpus < 1:
        raise ValueError(f"num_gpus ({num_gpus}) must be at least 1.")
    if num_gpus > len(present):
        raise too_many("num_gpus", num_gpus, range(num_gpus), present)
    return present[:num_gpus]


def device_names(kind: str) -> list[str]:
    """Returns the logical devices of a kind ("gpu" or "cpu"), such as ["/cpu:0", "/cpu:1"]."""
    count = len(tf.config.list_logical_devices(kind.upper()))
    return [f"/{kind}:{index}" for index in range(count)]


def device_list(devices: Sequence[str] | None) -> list[str]:
    """Returns the names in `devices`, or all devices for None; raises ValueError for a count."""
    if devices is None:
        return tower_devices()
    if isinstance(devices, str | int):
        if isinstance(devices, int):
            count = f"towers.tower_devices({devices})"
        else:
            count = f"[{devices!r}]"
        raise ValueError(f"devices ({devices!r}) must be a list of names; use devices={count}.")
    return list(devices)


def check_devices(devices: Sequence[str]) -> None:
    """Raises ValueError if a device is repeated, or absent (TensorFlow would use the CPU)."""
    if not devices:
        raise ValueError("devices is empty: name at least one, such as ['/cpu:0'].")
    present = {short_name(device.name) for device in tf.config.list_logical_devices()}
    for name in devices:
        if short_name(name) not in present:
            has = ", ".join(sorted(present))
            raise ValueError(f"device {name!r} is not on this machine. It has: {has}.")
    if len(set(map(short_name, devices))) < len(devices):
        raise ValueError(
            f"devices {list(devices)} names a device twice. For more towers than devices, "
            "name each device once and give num_towers."
        )


def place_towers(
    num_towers: int, devices: Sequence[str], counts: Sequence[int] | None = None
) -> list[str]:
    """Returns the device of each tower: tower t of T runs on device t * D // T.

    counts: the number of towers on each device, which get them in order; None: equal numbers.
    """
    if num_towers < 1:
        raise ValueError(f"num_towers ({num_towers}) must be at least 1.")
    if counts is not None:
        if len(counts) != len(devices) or sum(counts) != num_towers:
            raise ValueError(
                f"towers_per_device ({','.join(map(str, counts))}) places {sum(counts)} towers on "
                f"{len(counts)} devices, and there are {num_towers} towers for {len(devices)} "
                f"({', '.join(map(str, devices))}). Give {len(devices)} numbers with this sum."
            )
        return [device for device, n in zip(devices, counts, strict=True) for _ in range(n)]
    return [devices[t * len(devices) // num_towers] for t in range(num_towers)]


def is_gpu(device: str) -> bool:
    """Returns whether a device name, such as "/gpu:0" or "/device:GPU:0", names a GPU."""
    return "gpu" in device.lower()


def short_name(name: str) -> str:
    """Shortens a device name: "/job:localhost/device:CPU:0" becomes "/cpu:0"."""
    spec = tf.DeviceSpec.from_string(name if name.startswith("/") else f"/{name}")
    return f"/{(spec.device_type or 'CPU').lower()}:{spec.device_index or 0}"


def peak_memory(devices: Sequence[str]) -> int:
    """Returns the most bytes so far on any of these GPUs; on CPUs, in this process.

    Some allocators of GPUs do not count; then it is this process, too.
    """
    with suppress(ValueError, tf.errors.OpError):
        if is_gpu(devices[0]):
            return max(tf.config.experimental.get_memory_info(each)["peak"] for each in devices)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # the unit differs


def count_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_threads(num_towers: int, num_cores: int | None = None) -> tuple[int, int]:
    """Returns the numbers of (intra-op, inter-op) threads for towers, which share a CPU's cores.

    The intra-op count changes the bits of a CPU's results, so it does not depend on the devices.
    """
    cores = num_cores or count_cores()
    return max(1, cores // num_towers), cores


def intra_op_threads() -> int:
    """Returns the CPU threads of each operation; TensorFlow's default is one per core."""
    return tf.config.threading.get_intra_op_parallelism_threads() or count_cores()


def has_started() -> bool:
    """Returns whether TensorFlow has started. No public name says so; new threads then fail."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def set_graph_optimizer(is_on: bool) -> None:
    """Configures grappler, TensorFlow's graph optimizer."""
    # With these optimizations, the bits would depend on what shares a device or function: they
    # rewrite additions, fuse operations and move factors.
    off = dict.fromkeys(("arithmetic_optimization", "remapping", "constant_folding"), False)
    tf.config.optimizer.set_experimental_options({**off, "disable_meta_optimizer": not is_on})


def device_kind(device: str) -> str:
    """Returns "gpu" or "cpu" for a device choice; raises ValueError if it needs a missing GPU."""
    if device not in ("auto", "gpu", "cpu"):
        raise ValueError(f"device ({device!r}) must be one of auto, gpu, cpu.")
    if device == "auto":
        if has_gpus():
            return "gpu"
        return "cpu"
    if device == "gpu" and not has_gpus():
        raise ValueError(
            "device=gpu: TensorFlow sees no GPU on this machine. Use device=auto or "
            "device=cpu to run the towers on logical CPU devices."
        )
    return device


def too_many(
    name: str, value: object, indices: Sequence[int], present: Sequence[str]
) -> ValueError:
    """Makes the error for a value that stands for device indices, some of which do not exist."""
    what, remedy = "GPUs that TensorFlow sees", "Use"
    if not is_gpu(present[0]):
        what = "logical CPU devices here"
        remedy = f"Call towers.logical_cpus({max(indices) + 1}) {FIRST}, or use"
    count = len(present)
    return ValueError(
        f"{name} ({value!r}) is more than the {what}: {count} ({', '.join(present)}). {remedy} "
        f"{name}={count}, or {name}={count} with num_towers={len(indices)}."
    )


def tower_range(first: int, last: int) -> str:
    """Returns "0-7", or "3" for a single tower."""
    if last > first:
        return f"{first}-{last}"
    return f"{first}"


def placement(tower_devices: Sequence[str], first: int) -> str:
    """Returns "towers 0-1 on /gpu:0, /gpu:1"; `first` is the index of the first tower."""
    counts = [(device, len(list(towers))) for device, towers in groupby(tower_devices)]
    num_towers = len(tower_devices)
    if len({count for _, count in counts}) == 1:
        names = [device for device, _ in counts]
        if len(names) > 3:
            where = f"{names[0]} ... {names[-1]}"
        else:
            where = ", ".join(names)
        each = f" ({counts[0][1]} each)" if 1 < len(names) < num_towers else ""
        towers = tower_range(first, first + num_towers - 1)
        return f"{plural('tower', num_towers)} {towers} on {where}{each}"
    parts = []
    for device, count in counts:
        parts.append(f"{tower_range(first, first + count - 1)} on {device}")
        first += count
    return f"towers {', '.join(parts)}"


REHEARSAL = "TOWERS_REHEARSE_GPUS"


@dataclass(frozen=True)
class Policy:
    """Says all in which a step depends on the kind of device; the defaults are for CPUs."""

    # A tower waits for the previous one on its device, which then needs the memory of one tower.
    take_turns: bool = False
    # Each addition of the sum runs on the device of its left operand, and one sum reaches the
    # parameter device. GPUs and CPUs treat denormal numbers differently: one sum never uses both.
    add_on_devices: bool = False
    # Grappler pays on GPUs (image layout). On a CPU it took a third of the first step for nothing.
    optimize_graphs: bool = False
    divide_cores: bool = True  # towers share the CPU's cores, by `cpu_threads`
    prefetch_to_devices: bool = False  # each shard is copied while the previous step runs
    pack_transfers: bool = False  # small values travel as one vector for each dtype
    shares_memory: bool = True  # nothing moves between the devices; --plan counts as on GPUs


CPU = Policy()
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
    """Returns `GPU` if any of the devices is a GPU or must behave like one, else `CPU`."""
    if is_rehearsal() or any(map(is_gpu, devices)):
        return GPU
    return CPU


def is_rehearsal() -> bool:
    """Returns whether the environment makes logical CPU devices follow the GPUs' policy."""
    return os.environ.get(REHEARSAL) == "1"
