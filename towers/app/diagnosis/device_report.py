"""Reports for --devices the devices that TensorFlow sees, and which of them towers would use."""

import os
import platform
import sys

import keras
import tensorflow as tf

from towers import __version__
from towers.app.command_line import as_flags
from towers.app.config import TrainConfig
from towers.app.reporting.report import devices_line, labelled
from towers.app.training.build import find_devices
from towers.machine import nvidia
from towers.machine.devices import count_cores, intra_op_threads, place_towers
from towers.machine.logical import shared_gpus
from towers.machine.words import counted


def device_report(config: TrainConfig) -> list[str]:
    """Returns lines on the machine's devices. Starts TensorFlow with the configured devices.

    Args:
        config: its num_gpus, logical_gpus, num_towers, device and cpu_threads are tried.
    """
    versions = f" | TensorFlow {tf.__version__}, Keras {keras.__version__}"
    towers = _towers(config)  # before TensorFlow starts: it sets threads and logical devices
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    threads = counted(intra_op_threads(), "thread")
    cpu = f"{counted(count_cores(), 'core')}; {threads} in each operation"
    return [
        f"towers {__version__}{versions}",
        labelled("Python", f"{platform.python_version()} in {sys.prefix}"),
        *towers,
        *_gpus(visible),
        labelled("CPU", cpu),
    ]


def _towers(config: TrainConfig) -> list[str]:
    try:
        devices = find_devices(config)
        each = config.gpus_per_tower
        towers = place_towers(config.num_towers_on(len(devices)), devices[::each])
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        return [labelled("Devices", f"none: {as_flags(str(error))}")]
    lines = [devices_line(f"/{config.variable_device}:0", towers, stages=each)]
    if (sharing := shared_gpus()) is not None:
        lines.append(labelled("", sharing))
    return lines


def _gpus(visible: str | None) -> list[str]:
    """Returns lines on TensorFlow's GPUs, or why it sees none, then on the driver's GPUs."""
    listed, version = nvidia.driver_gpus(), nvidia.driver_version()
    build = tf.sysconfig.get_build_info()
    gpus = []
    for index, gpu in enumerate(tf.config.list_physical_devices("GPU")):
        details = tf.config.experimental.get_device_details(gpu)
        name = details.get("device_name", "unknown")
        capability = ".".join(map(str, details.get("compute_capability", ("unknown",))))
        gpus.append(f"/gpu:{index}  {name}, compute capability {capability}")
    if not gpus:
        has_driver = bool(listed or version)
        gpus = nvidia.why_no_gpu(tf.test.is_built_with_cuda(), has_driver, visible)
        gpus[0] = f"none: {gpus[0]}"
    driver = [version or ("not found" if listed is None else "found")]
    for known in listed or []:
        total, free = ("[N/A]" if m is None else m for m in (known.memory, known.free_memory))
        driver.append(f"GPU {known.number}  {known.name}, {total} MiB, {free} MiB free")
    cuda = "TensorFlow is built without it"
    if build.get("is_cuda_build"):
        numbers = (build.get(f"{name}_version", "unknown") for name in ("cuda", "cudnn"))
        cuda = "TensorFlow is built for CUDA {}, cuDNN {}".format(*numbers)
    blocks = ("GPUs", gpus), ("Driver", driver), ("CUDA", [cuda])
    return [
        labelled("" if index else label, line)
        for label, lines in blocks for index, line in enumerate(lines)
    ]
