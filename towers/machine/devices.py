"""The devices of this machine, and which of them runs each tower.

    tower 0 ... tower T-1   ->   device 0 ... device D-1      tower t runs on device t * D // T
"""

import os
from collections.abc import Sequence
from itertools import groupby

import tensorflow as tf

from towers.machine.words import plural

HOST = "/cpu:0"  # whose memory holds the global batches
# When devices are made: of a notebook's cells, any that makes a model is too early for another.
FIRST = "before anything else uses TensorFlow (in a notebook: restart the kernel, call it first)"
DEVICE_CHOICES = ("auto", "gpu", "cpu")


def has_gpus() -> bool:
    """Whether TensorFlow sees a GPU; does not start its runtime."""
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
    """All logical devices of a kind ("gpu" or "cpu"), such as ["/cpu:0", "/cpu:1"]."""
    count = len(tf.config.list_logical_devices(kind.upper()))
    return [f"/{kind}:{index}" for index in range(count)]


def check_devices(devices: Sequence[str]) -> None:
    """Raises ValueError when a device is absent: soft placement would silently use the CPU."""
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
    """The device of each tower: tower t of T runs on device t * D // T (contiguous ranges).

    Raises:
        ValueError: `num_towers` is below 1.
    """
    if num_towers < 1:
        raise ValueError(f"num_towers ({num_towers}) must be at least 1.")
    return [devices[t * len(devices) // num_towers] for t in range(num_towers)]


def is_gpu(device: str) -> bool:
    """Whether a device name such as "/gpu:0" or "/device:GPU:0" is a GPU's."""
    return "gpu" in device.lower()


def short_name(name: str) -> str:
    """A device's name as towers writes it, such as "/cpu:0" of "/job:localhost/device:CPU:0"."""
    spec = tf.DeviceSpec.from_string(name if name.startswith("/") else f"/{name}")
    return f"/{(spec.device_type or 'CPU').lower()}:{spec.device_index or 0}"


def count_cores() -> int:
    """The processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_threads(
    num_towers: int, num_cores: int | None = None, *, compiled: bool = False
) -> tuple[int, int]:
    """Threads for towers on a CPU: (intra-op, inter-op).

    One thread per tower, and the cores shared among the towers: towers side by side scale better
    than threads inside each operation. The intra-op count changes the bits of a CPU's results, so
    it follows from the tower count and the cores, never from the device count.

    Towers that XLA compiles run on the intra-op threads alone: with one, they would take turns.
    """
    cores = num_cores or count_cores()
    at_once = min(num_towers, cores) if compiled else 1
    return max(at_once, cores // num_towers), cores


def intra_op_threads() -> int:
    """The threads of each operation on the CPU; TensorFlow's own default is one a core."""
    return tf.config.threading.get_intra_op_parallelism_threads() or count_cores()


def has_started() -> bool:
    """Whether TensorFlow has started; it has no public way to ask, but refuses new threads then."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def set_graph_optimizer(is_on: bool) -> None:
    """Sets grappler, TensorFlow's graph optimizer, up for towers.

    Off are those that change bits by what shares a device or a function: the arithmetic
    optimization rewrites additions, the remapper fuses, constant folding moves factors.
    """
    off = dict.fromkeys(("arithmetic_optimization", "remapping", "constant_folding"), False)
    tf.config.optimizer.set_experimental_options({**off, "disable_meta_optimizer": not is_on})


def device_kind(device: str) -> str:
    """"gpu" or "cpu", of one of `DEVICE_CHOICES`; raises ValueError for a GPU that is not there."""
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
    """The error where more devices are asked for than are present, with the ways out.

    Args:
        name, value: of the argument.
        indices: of the devices that it stands for.
        present: names of devices, all of one kind.
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
    """"0-7", or "3" for a single tower."""
    return f"{first}-{last}" if last > first else f"{first}"


def placement(tower_devices: Sequence[str], first: int) -> str:
    """"towers 0-1 on /gpu:0, /gpu:1"; `first`: the first of these towers."""
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
