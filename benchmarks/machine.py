"""The machine that figures are measured on.

    python -m benchmarks.machine      what TensorFlow sees, as a JSON line
"""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

_SMI_FIELDS = (  # of `nvidia-smi --help-query-gpu`; a driver answers for what it knows
    "index", "name", "driver_version", "memory.total", "power.limit", "power.max_limit",
    "clocks.max.sm", "clocks.max.mem", "clocks.sm", "clocks.mem", "temperature.gpu",
    "persistence_mode", "compute_mode", "mig.mode.current", "pcie.link.gen.max",
    "pcie.link.gen.current", "pcie.link.width.current",
)
_SMI_SECONDS = 10


def machine() -> dict[str, str]:
    """The processor and the versions, for every row of a CSV."""
    return {
        "cores": str(count_cores()), "processor": processor(),
        "python": platform.python_version(), "tensorflow": version("tensorflow"),
        "keras": version("keras"),
    }


def count_cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), "unknown")


def is_rehearsal() -> bool:
    """Whether logical CPU devices are to follow the GPUs' policy."""
    return os.environ.get("TOWERS_REHEARSE_GPUS") == "1"


def nvidia_smi(fields: Sequence[str] = _SMI_FIELDS) -> list[dict[str, str]]:
    """{field: value, with its unit} of each GPU; what the driver does not know is left out.

    Empty where nvidia-smi is missing or does not answer. A field that it has never heard of makes
    it refuse all of them, so each is asked for by itself then.
    """
    answer = query(fields)
    if answer is None and len(fields) > 1:
        single = [query([field]) or [] for field in fields]
        answer = [sum(cells, []) for cells in zip(*filter(None, single), strict=False)]
        fields = [field for field, column in zip(fields, single, strict=True) if column]
    return [
        {f: cell for f, cell in zip(fields, cells, strict=True) if not cell.startswith("[")}
        for cells in answer or []
    ]


def describe_devices(num_devices: int, gpus: Sequence[Mapping[str, Any]]) -> str:
    """A number of devices in words: "2 logical CPU devices rehearsing GPUs", "NVIDIA H200".

    Args:
        num_devices: that are used.
        gpus: the list from `seen_by_tensorflow`.
    """
    if not gpus:
        kind = "logical CPU devices" if num_devices > 1 else "CPU device"
        return f"{num_devices} {kind}{' rehearsing GPUs' if is_rehearsal() else ''}"
    name = gpus[0]["name"]
    if num_devices > len(gpus):
        return f"{num_devices} logical GPUs on {len(gpus)} x {name}"
    return f"{num_devices} x {name}"


def seen_by_tensorflow() -> dict[str, Any]:
    """{"gpus": [{"name", "compute_capability"}], "cuda", "cudnn"}; takes no GPU's memory."""
    import tensorflow as tf

    gpus = []
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", ())))
        gpus.append({"name": details.get("device_name", "GPU"), "compute_capability": capability})
    build = tf.sysconfig.get_build_info()
    return {
        "gpus": gpus, "cuda": build.get("cuda_version", ""), "cudnn": build.get("cudnn_version", "")
    }


def query(fields: Sequence[str]) -> list[list[str]] | None:
    """The cells of each GPU's line; None where nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [cells for cells in lines if len(cells) == len(fields)]


if __name__ == "__main__":
    print(json.dumps(seen_by_tensorflow()))
