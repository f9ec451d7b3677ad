"""NVIDIA's GPUs, driver and CUDA libraries on this machine; and why TensorFlow sees no GPU.

Nothing here raises because something is absent: it is None, or missing from the result.
"""

import ctypes
import importlib.metadata
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pynvml

LIBRARIES = {  # what towers' work needs of CUDA -> the file's name up to ".so"
    "CUDA": "libcudart",
    "cuBLAS": "libcublas",
    "cuDNN": "libcudnn",
    "NCCL": "libnccl",
    "driver": "libcuda",
}
_TENSORFLOW_NEEDS = ("CUDA", "cuBLAS", "cuDNN")  # of these: without one of them it uses no GPU

PCI = Path("/sys/bus/pci/devices")
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
LOADED_FILES = Path("/proc/self/maps")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI: the vendor, the class of display controllers
PATIENCE = 10  # seconds; NVML takes some where the driver has to start first
_MIB = 2**20


class DriverGpu(NamedTuple):
    """A GPU that the driver knows, whether or not this process may use it.

    number: nvidia-smi's, which need not be TensorFlow's.
    memory, free_memory: in MiB; None where a GPU has no memory of its own.
    driver: its version.
    """

    number: int
    name: str
    memory: int | None
    free_memory: int | None
    driver: str


class Package(NamedTuple):
    """A library of a pip package: "nvidia-cudnn-cu12 9.3.0.75" and the library's path."""

    name: str
    path: str


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
    # A thread of its own: a call into a driver that hangs cannot be ended.
    asking = Thread(target=_ask, args=(visible, answers), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return answers[0] if answers else None


def _ask(visible: str | None, answers: list[list[DriverGpu]]) -> None:
    """Appends what `driver_gpus` returns; nothing where NVML is missing or fails."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            names = visible.split(",") if visible else map(str, range(pynvml.nvmlDeviceGetCount()))
            answers.append([_driver_gpu(name.strip()) for name in names])
        finally:
            pynvml.nvmlShutdown()


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
        pynvml.nvmlSystemGetDriverVersion(),
    )


def has_driver() -> bool:
    """Whether the driver's library can be loaded, which TensorFlow tries first."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def has_card() -> bool:
    """Whether an NVIDIA GPU is on the PCI bus; False where the bus cannot be seen."""
    for device in PCI.glob("*"):
        try:
            if (device / "vendor").read_text().strip() != _NVIDIA:
                continue
            if (device / "class").read_text().startswith(_DISPLAY):
                return True
        except OSError:
            continue
    return False


def loaded_libraries() -> dict[str, str]:
    """{name up to ".so": path} of the shared libraries in this process."""
    try:
        lines = LOADED_FILES.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    paths = [line[line.index("/"):] for line in lines if "/" in line]
    return {Path(path).name.split(".so")[0]: path for path in paths if ".so" in path}


def pip_libraries() -> dict[str, Package]:
    """{name up to ".so": package} of the shared libraries in the pip packages nvidia-*."""
    found = {}
    for package in importlib.metadata.distributions():
        if not (package.name or "").startswith("nvidia-"):
            continue
        for file in package.files or []:
            if ".so" in file.name:
                name = f"{package.name} {package.version}"
                path = str(package.locate_file(file))
                found[file.name.split(".so")[0]] = Package(name, path)
    return found


def missing_libraries(found: Sequence[str]) -> list[str]:
    """The CUDA libraries that TensorFlow needs and these file names, up to ".so", lack."""
    return [name for name in _TENSORFLOW_NEEDS if LIBRARIES[name] not in found]


def why_no_gpu(
    is_cuda_build: bool, card: bool, driver: bool, visible: str | None, missing: Sequence[str]
) -> list[str]:
    """The probable reasons why TensorFlow sees no GPU, and the ways out.

    Args:
        is_cuda_build: whether TensorFlow is built with CUDA.
        card: see `has_card`.
        driver: see `has_driver`.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        missing: see `missing_libraries`.
    """
    if not is_cuda_build:
        return ["this TensorFlow is built without CUDA; on Linux: pip install -e '.[cuda]'"]
    reasons = []
    if not driver and card:
        reasons.append("the NVIDIA GPU on the PCI bus has no driver (libcuda.so.1)")
    elif not driver:
        reasons.append("no NVIDIA GPU on the PCI bus, and no driver (libcuda.so.1)")
    elif missing:
        reasons.append(f"{', '.join(missing)} not found: pip install -e '.[cuda]'")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        reasons.append(f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU: unset it")
    elif visible is not None and driver and not missing:
        reasons.append(f"CUDA_VISIBLE_DEVICES={visible!r} may name no GPU here: unset it")
    return reasons or ["TensorFlow's own messages say why: add --verbosity=1"]
