"""Describes the machine on which figures are measured."""

import os
import platform
import resource
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

_SMI_FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "power.limit",
    "power.max_limit",
    "clocks.max.sm",
    "clocks.max.mem",
    "clocks.sm",
    "clocks.mem",
    "temperature.gpu",
    "persistence_mode",
    "compute_mode",
    "mig.mode.current",
    "pcie.link.gen.max",
    "pcie.link.gen.current",
    "pcie.link.width.current",
)


def describe_machine() -> dict[str, str]:
    """Returns the columns about the machine that every row of a CSV has."""
    return {
        "cores": str(count_cores()),
        "processor": processor(),
        "python": platform.python_version(),
        "tensorflow": version("tensorflow"),
        "keras": version("keras"),
    }


def commit() -> str:
    """Returns the commit of this checkout, or "" outside of a repository."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip()


def count_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor() -> str:
    """Returns the processor's name, or "unknown"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), "unknown")


def is_rehearsal() -> bool:
    """Returns whether logical CPU devices follow the policy for GPUs."""
    return os.environ.get("TOWERS_REHEARSE_GPUS") == "1"


def peak_memory_mb() -> float:
    """Returns the largest host memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def nvidia_smi() -> list[dict[str, str]]:
    """Returns {field: value with its unit} per GPU; [] if nvidia-smi is missing or fails.

    `nvidia-smi --help-query-gpu` explains the fields. Unknown values are left out.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [
        {field: cell for field, cell in zip(_SMI_FIELDS, cells, strict=False) if cell[:1] != "["}
        for cells in rows
    ]


def describe_devices(num_devices: int, gpus: Sequence[Mapping[str, Any]]) -> str:
    """Returns a description such as "2 x NVIDIA H200" or "2 logical CPU devices rehearsing GPUs".

    Args:
        num_devices: number of devices that are used.
        gpus: the machine's GPUs, from `describe_tensorflow`.
    """
    if not gpus:
        kind = "logical CPU devices" if num_devices > 1 else "CPU device"
        return f"{num_devices} {kind}{' rehearsing GPUs' if is_rehearsal() else ''}"
    name = gpus[0]["name"]
    if num_devices > len(gpus):
        return f"{num_devices} logical GPUs on {len(gpus)} x {name}"
    return f"{num_devices} x {name}"


def describe_tensorflow() -> dict[str, Any]:
    """Returns {"gpus": [{"name", "compute_capability"}], "cuda", "cudnn"}; allocates no GPU memory.

    It imports TensorFlow.
    """
    import tensorflow as tf

    gpus = []
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", ())))
        gpus.append({"name": details.get("device_name", "GPU"), "compute_capability": capability})
    build = tf.sysconfig.get_build_info()
    return {
        "gpus": gpus,
        "cuda": build.get("cuda_version", ""),
        "cudnn": build.get("cudnn_version", ""),
    }
