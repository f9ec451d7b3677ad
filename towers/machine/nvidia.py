"""Finds NVIDIA's driver and GPUs on this machine, and explains why TensorFlow sees no GPU."""

import re
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pynvml

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
PATIENCE = 10  # seconds; NVML is slow if the driver has to start first
_MIB = 2**20


class DriverGpu(NamedTuple):
    """Describes a GPU that the driver knows, whether or not this process may use it."""

    number: int  # nvidia-smi's, which may differ from TensorFlow's
    name: str
    memory: int | None  # MiB; None if the GPU shares the host's memory
    free_memory: int | None


def driver_version() -> str | None:
    """Returns the version of the kernel's NVIDIA driver, such as "550.54.15", or None."""
    try:
        found = re.search(r"\s(\d+\.[\d.]+)\s", DRIVER_VERSION.read_text(encoding="utf-8"))
    except OSError:
        return None
    if found:
        return found[1]
    return None


def driver_gpus(visible: str | None = None) -> list[DriverGpu] | None:
    """Returns the GPUs that NVML lists, or those in CUDA_VISIBLE_DEVICES; None if it fails."""
    answers: list[list[DriverGpu]] = []

    def describe(name: str) -> DriverGpu:
        is_number = re.fullmatch(r"-?\d+", name)
        if is_number:
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

    def query() -> None:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            try:
                count = pynvml.nvmlDeviceGetCount()
                if visible:
                    names = visible.split(",")
                else:
                    names = [str(i) for i in range(count)]
                answers.append([describe(name.strip()) for name in names])
            finally:
                pynvml.nvmlShutdown()

    # In a separate thread, because a call into a hanging driver cannot be ended.
    thread = Thread(target=query, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if answers:
        return answers[0]
    return None


def why_no_gpu(is_cuda_build: bool, has_driver: bool, visible: str | None) -> list[str]:
    """Returns probable reasons, with fixes; `visible` is CUDA_VISIBLE_DEVICES, or None."""
    if not is_cuda_build:
        return ["this TensorFlow is built without CUDA; on Linux: pip install -e '.[cuda]'"]
    reasons = {
        "no NVIDIA driver; if this machine has an NVIDIA GPU, install its driver": not has_driver,
        f"CUDA_VISIBLE_DEVICES={visible!r} hides GPUs, or names none of this machine: unset it": visible
        is not None,
        "CUDA's libraries may be missing, or older: pip install -e '.[cuda]'": has_driver,
        "TensorFlow's own messages say more: add --verbosity=1": has_driver,
    }
    return [reason for reason, applies in reasons.items() if applies]
