"""NVIDIA's driver and GPUs on this machine; and why TensorFlow sees no GPU.

Nothing here raises because something is absent: the result is None.
"""

import re
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pynvml

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
PATIENCE = 10  # seconds; NVML takes some where the driver has to start first
_MIB = 2**20


class DriverGpu(NamedTuple):
    """A GPU that the driver knows, whether or not this process may use it.

    number: nvidia-smi's, which need not be TensorFlow's.
    memory, free_memory: in MiB; None where a GPU has no memory of its own.
    """

    number: int
    name: str
    memory: int | None
    free_memory: int | None


def driver_version() -> str | None:
    """The version of the driver in the kernel, such as "550.54.15"."""
    try:
        found = re.search(r"\s(\d+\.[\d.]+)\s", DRIVER_VERSION.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def driver_gpus(visible: str | None = None) -> list[DriverGpu] | None:
    """The GPUs that NVML, nvidia-smi's library, lists; None where it fails or does not answer.

    Args:
        visible: numbers or UUIDs as in CUDA_VISIBLE_DEVICES; None or "" means all.
    """
    answers: list[list[DriverGpu]] = []

    def query() -> None:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            try:
                count = pynvml.nvmlDeviceGetCount()
                names = visible.split(",") if visible else map(str, range(count))
                answers.append([_driver_gpu(name.strip()) for name in names])
            finally:
                pynvml.nvmlShutdown()

    # A thread of its own: a call into a driver that hangs cannot be ended.
    thread = Thread(target=query, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answers[0] if answers else None


def _driver_gpu(name: str) -> DriverGpu:
    """The GPU of a number or UUID."""
    if re.fullmatch(r"-?\d+", name):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(int(name))
    else:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(name)
    memory: Any = None
    with suppress(pynvml.NVMLError_NotSupported):
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    return DriverGpu(
        pynvml.nvmlDeviceGetIndex(gpu),
        pynvml.nvmlDeviceGetName(gpu),
        memory and memory.total // _MIB,
        memory and memory.free // _MIB,
    )


def why_no_gpu(is_cuda_build: bool, has_driver: bool, visible: str | None) -> list[str]:
    """The probable reasons why TensorFlow sees no GPU, each with what to do.

    Args:
        is_cuda_build: whether TensorFlow is built with CUDA.
        has_driver: whether NVIDIA's driver is there.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
    """
    if not is_cuda_build:
        return ["this TensorFlow is built without CUDA; on Linux: pip install -e '.[cuda]'"]
    is_hidden = visible is not None and visible.split(",")[0].strip() in ("", "-1")
    reasons = []
    if not has_driver:
        reasons.append("no NVIDIA driver; if this machine has an NVIDIA GPU, install its driver")
    if is_hidden:
        reasons.append(f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU: unset it")
    elif has_driver:
        if visible is not None:
            reasons.append(f"CUDA_VISIBLE_DEVICES={visible!r} may name no GPU here: unset it")
        reasons.append("CUDA's libraries may be missing, or older: pip install -e '.[cuda]'")
        reasons.append("TensorFlow's own messages say more: add --verbosity=1")
    return reasons
