"""Lists the devices of this machine, assigns each tower to one, and decides how towers use them.

tower 0 ... tower T-1   ->   device 0 ... device D-1      tower t runs on device t * D // T

`Policy` is the one place for everything that depends on the kind of device. Towers on GPUs follow
`GPU`. If the environment has TOWERS_REHEARSE_GPUS=1, towers on logical CPU devices follow it, too,
which runs the code for GPUs without a GPU.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import tensorflow as tf

from towers.machine.words import plural

HOST = "/cpu:0"  # its memory holds the global batches
# A notebook cell that makes a model starts TensorFlow; after that, no devices can be made.
FIRST = "before anything else uses TensorFlow (in a notebook: restart the kernel, call it first)"
DEVICE_CHOICES = ("auto", "gpu", "cpu")


def has_gpus() -> bool:
    """Returns whether TensorFlow sees a GPU, without starting its runtime."""
    return bool(tf.config.list_physical_devices("GPU"))


def tower_devices(num_gpus: int | None = None, device: str = "auto") -> list[str]:
    """
    Returns the names of the devices that towers run on, in order.

    Args:
        num_gpus: the number of devices. Default: all.
        device: "gpu", "cpu" for logical CPU devices, or "auto", which takes GPUs if there are any.

    Returns:
        Device names, such as ["/gpu:0", "/gpu:1"].

    Raises:
        ValueError: there are fewer devices, or an argument is wrong.
    """
    kind = device_kind(device)
    present = device_names(kind)
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


def check_devices(devices: Sequence[str]) -> None:
    """Raises ValueError if a device is repeated, or absent (TensorFlow would use the CPU)."""
    if not devices:
        raise ValueError("devices is empty: name at least one, such as ['/cpu:0'].")
    present = {short_name(d.name): d.name for d in tf.config.list_logical_devices()}
    for name in devices:
        if short_name(name) not in present:
            short = ", ".join(sorted(present.keys()))
            raise ValueError(f"device {name!r} is not on this machine. It has: {short}.")
    canonical = [short_name(name) for name in devices]
    if len(set(canonical)) < len(canonical):
        raise ValueError(
            f"devices {list(devices)} names a device twice. For more towers than devices, "
            "name each device once and give num_towers."
        )


def place_towers(num_towers: int, devices: Sequence[str]) -> list[str]:
    """Returns the device of each tower: tower t of T runs on device t * D // T.

    Raises:
        ValueError: `num_towers` is below 1.
    """
    if num_towers < 1:
        raise ValueError(f"num_towers ({num_towers}) must be at least 1.")
    return [devices[t * len(devices) // num_towers] for t in range(num_towers)]


def is_gpu(device: str) -> bool:
    """Returns whether a device name, such as "/gpu:0" or "/device:GPU:0", names a GPU."""
    return "gpu" in device.lower()


def short_name(name: str) -> str:
    """Shortens a device name: "/job:localhost/device:CPU:0" becomes "/cpu:0"."""
    spec = tf.DeviceSpec.from_string(name if name.startswith("/") else f"/{name}")
    return f"/{(spec.device_type or 'CPU').lower()}:{spec.device_index or 0}"


def count_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_threads(
    num_towers: int, num_cores: int | None = None, *, compiled: bool = False
) -> tuple[int, int]:
    """Returns the numbers of (intra-op, inter-op) threads for towers on a CPU.

    Towers run side by side and share the cores, because this scales better than more threads
    inside each operation. The intra-op count changes the bits of a CPU's results, so it follows
    from the tower count and the cores, never from the device count.

    Compiled towers run on the intra-op threads alone; with one thread, they would take turns.
    """
    cores = num_cores or count_cores()
    at_once = min(num_towers, cores) if compiled else 1
    return max(at_once, cores // num_towers), cores


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
    """Configures grappler, TensorFlow's graph optimizer, for towers.

    Three optimizations are off, because the bits would depend on what shares a device or function:
    arithmetic optimization rewrites additions, remapping fuses, constant folding moves factors.
    """
    off = dict.fromkeys(("arithmetic_optimization", "remapping", "constant_folding"), False)
    tf.config.optimizer.set_experimental_options({**off, "disable_meta_optimizer": not is_on})


def device_kind(device: str) -> str:
    """Returns "gpu" or "cpu" for a device choice; raises ValueError if it needs a missing GPU."""
    if device not in DEVICE_CHOICES:
        raise ValueError(f"device ({device!r}) must be one of {', '.join(DEVICE_CHOICES)}.")
    if device == "auto":
        return "gpu" if has_gpus() else "cpu"
    if device == "gpu" and not has_gpus():
        raise ValueError(
            "device=gpu: TensorFlow sees no GPU on this machine. Use device=auto or "
            "device=cpu to run the towers on logical CPU devices."
        )
    return device


def too_many(
    name: str, value: object, indices: Sequence[int], present: Sequence[str]
) -> ValueError:
    """Makes the error for an argument that needs more devices than are present.

    Args:
        name, value: the argument's name and its value.
        indices: the device indices that the value stands for.
        present: names of the present devices, all of one kind.
    """
    count = len(present)
    has = f"{count} ({', '.join(present)})"
    fewer = f"{name}={count}, or {name}={count} with num_towers={len(indices)}"
    if not is_gpu(present[0]):
        return ValueError(
            f"{name} ({value!r}) is more than the logical CPU devices here: {has}. Call "
            f"towers.logical_cpus({max(indices) + 1}) {FIRST}, or use {fewer}."
        )
    all_gpus = tf.config.list_physical_devices("GPU")
    is_whole = len(tf.config.get_visible_devices("GPU")) >= len(all_gpus)
    which = "this machine has" if is_whole else "are left of those that an earlier call has hidden"
    return ValueError(f"{name} ({value!r}) is more than {which}: {has}. Use {fewer}.")


def tower_range(first: int, last: int) -> str:
    """Returns "0-7", or "3" for a single tower."""
    return f"{first}-{last}" if last > first else f"{first}"


def placement(tower_devices: Sequence[str], first: int) -> str:
    """Returns "towers 0-1 on /gpu:0, /gpu:1"; `first` is the index of the first tower."""
    counts = [(device, len(list(towers))) for device, towers in groupby(tower_devices)]
    num_towers = len(tower_devices)
    if len({count for _, count in counts}) == 1:
        names = [device for device, _ in counts]
        where = f"{names[0]} ... {names[-1]}" if len(names) > 3 else ", ".join(names)
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
