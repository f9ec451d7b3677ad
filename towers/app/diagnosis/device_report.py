"""--devices: versions, libraries, GPUs, CPU and threads, and what the towers would run on."""

import os
import platform
import sys
import textwrap
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from rich.text import Text

from towers import __version__
from towers.app.command_line import as_flags
from towers.app.config import TrainConfig
from towers.machine import nvidia, tensorflow_internals
from towers.machine.devices import count_cores, intra_op_threads, is_gpu, place_towers
from towers.machine.logical import shared_gpus
from towers.machine.words import counted
from towers.app.reporting.formats import format_bytes
from towers.app.reporting.report import devices_line, labelled
from towers.app.training.build import find_devices

_COLUMNS = 90  # of a line, beside its label
CPU_INFO = Path("/proc/cpuinfo")
_CPU_FEATURES = (  # that TensorFlow's and oneDNN's kernels choose by: x86, then Arm
    "avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "sve", "bf16", "i8mm",
)
_VARIABLES = (  # of the environment; shown where they are set
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH", "NVIDIA_TF32_OVERRIDE",
    "TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR", "TF_GPU_THREAD_MODE", "TF_DETERMINISTIC_OPS",
    "TF_ENABLE_ONEDNN_OPTS", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS", "TF_XLA_FLAGS", "XLA_FLAGS",
)


def device_report(config: TrainConfig) -> list[Text]:
    """The machine's devices and libraries, line by line; what is absent is "none" or "not found".

    Starts TensorFlow with the devices of the configuration.

    Args:
        config: whose --num_gpus, --logical_gpus, --num_towers, --device, --cpu_threads are tried.
    """
    towers = _towers(config)  # first: threads and logical devices must precede TensorFlow's start
    return [*_versions(), *towers, *_gpus(), *_driver(), *_cuda(), *_cpu(), *_environment()]


def cpu_features(flags: str) -> str:
    """The features of a processor that kernels choose by: "AVX2, FMA, AVX512F".

    Args:
        flags: as /proc/cpuinfo lists them, separated by spaces.
    """
    present = set(flags.split())
    return ", ".join(name.upper() for name in _CPU_FEATURES if name in present) or "none"


def cpu_info(text: str) -> dict[str, str]:
    """{key: value} of the first processor in the text of /proc/cpuinfo."""
    first = text.strip().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _versions() -> list[Text]:
    python = f"Python {platform.python_version()} in {sys.prefix}"
    text = f" | TensorFlow {tf.__version__}, Keras {keras.__version__}, NumPy {np.__version__}"
    return [Text.assemble((f"towers {__version__}", "bold"), text), labelled("Python", python[7:])]


def _towers(config: TrainConfig) -> list[Text]:
    try:
        devices = find_devices(config)
        each = config.gpus_per_tower
        towers = place_towers(config.num_towers_on(len(devices)), devices[::each])
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        return [labelled("Devices", f"none: {as_flags(str(error))}")]
    lines = [devices_line(f"/{config.variable_device}:0", towers, stages=each)]
    sharing = shared_gpus()
    if sharing is not None:
        lines.append(labelled("", sharing))
    if not is_gpu(devices[0]):
        inter = tf.config.threading.get_inter_op_parallelism_threads() or count_cores()
        text = f"{intra_op_threads()} in each operation, {inter} operations at once"
        lines.append(labelled("Threads", text))
    return lines


def _gpus() -> list[Text]:
    """The GPUs that TensorFlow sees, or why it sees none."""
    lines = []
    for index, gpu in enumerate(tf.config.list_physical_devices("GPU")):
        details = tf.config.experimental.get_device_details(gpu)
        name = details.get("device_name", "unknown")
        capability = ".".join(map(str, details.get("compute_capability", ("unknown",))))
        lines.append(f"/gpu:{index}  {name}, compute capability {capability}")
    if not lines:
        found = {**nvidia.loaded_libraries(), **nvidia.pip_libraries()}
        first, *others = nvidia.why_no_gpu(
            tf.test.is_built_with_cuda(),
            nvidia.has_card(),
            nvidia.has_driver(),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            nvidia.missing_libraries(list(found)),
        )
        lines = [f"none: {first}", *others]
    return _block("GPUs", lines)


def _driver() -> list[Text]:
    """NVIDIA's driver and all the GPUs that it knows, also those hidden from this process."""
    gpus = nvidia.driver_gpus()
    version = nvidia.driver_version() or next((gpu.driver for gpu in gpus or []), "not found")
    lines = [version + ("; nvidia-smi not found, or without an answer" if gpus is None else "")]
    for gpu in gpus or []:
        total, free = ("[N/A]" if mib is None else mib for mib in (gpu.memory, gpu.free_memory))
        lines.append(f"GPU {gpu.number}  {gpu.name}, {total} MiB, {free} MiB free")
    return _block("Driver", lines)


def _cuda() -> list[Text]:
    """The CUDA version that TensorFlow is built for, and where the libraries are."""
    build = tf.sysconfig.get_build_info()
    if not build.get("is_cuda_build"):
        return [labelled("CUDA", "TensorFlow is built without it")]
    version = build.get("cuda_version", "unknown")
    capabilities = ", ".join(build.get("cuda_compute_capabilities", ())) or "unknown"
    lines = [
        f"TensorFlow is built for CUDA {version}, cuDNN {build.get('cudnn_version', 'unknown')}; "
        f"{capabilities}"
    ]
    loaded, packages = nvidia.loaded_libraries(), nvidia.pip_libraries()
    for name, file in nvidia.LIBRARIES.items():
        lines.append(f"{name:<8}{library_line(loaded.get(file), packages.get(file))}")
    return _block("CUDA", lines)


def library_line(loaded: str | None, package: nvidia.Package | None) -> str:
    """"nvidia-cudnn-cu12 9.3.0.75, not loaded: lib/.../libcudnn.so.9"; paths from sys.prefix."""
    if loaded is None and package is None:
        return "not found"
    # A library from elsewhere may be loaded beside a package's that nobody uses.
    is_packages = package is not None and loaded in (None, os.path.realpath(package.path))
    name = f"{package.name}, " if package is not None and is_packages else ""
    path = loaded or (package.path if package is not None else "")
    return f"{name}{'loaded' if loaded else 'not loaded'}: {_short(path)}"


def _cpu() -> list[Text]:
    try:
        info = cpu_info(CPU_INFO.read_text(encoding="utf-8"))
    except OSError:
        info = {}
    cores, present = count_cores(), os.cpu_count() or 1
    usable = counted(cores, "core") if cores == present else f"{cores} of {present} cores"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = info.get("model name") or platform.processor() or platform.machine()
    flags = info.get("flags") or info.get("Features") or ""
    machine = f"{name}, {usable}, {format_bytes(memory)} of memory"
    features = textwrap.wrap(f"{cpu_features(flags)}; oneDNN {_onednn()}", _COLUMNS)
    return _block("CPU", [machine, *features])


def _onednn() -> str:
    """Whether TensorFlow's oneDNN kernels are on."""
    is_on = tensorflow_internals.onednn_is_on()
    return "unknown" if is_on is None else "on" if is_on else "off"


def _environment() -> list[Text]:
    lines = [f"{name}={os.environ[name]!r}" for name in _VARIABLES if name in os.environ]
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        lines.insert(0, "CUDA_VISIBLE_DEVICES not set")
    return _block("Variables", lines)


def _short(path: str) -> str:
    return os.path.relpath(path, sys.prefix) if path.startswith(sys.prefix + os.sep) else path


def _block(label: str, lines: list[str]) -> list[Text]:
    """Lines under one label."""
    return [labelled(label if i == 0 else "", line) for i, line in enumerate(lines)]
