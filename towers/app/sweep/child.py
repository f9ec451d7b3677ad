"""python -m towers.app.sweep.child PARENT TRAIN RUN_DIR --flags: a run, then its memory.

The memory goes to cell.json in the run's directory; only the process itself can ask TensorFlow.
"""

import json
import resource
import runpy
import sys
from pathlib import Path

from towers.machine import parent

MEASURED = "cell.json"


def main(script: str, run_dir: str, flags: list[str]) -> None:
    """Runs the script as Python itself would.

    Args:
        script: a path, or the name of a module.
        run_dir: its --run_dir.
        flags: its other flags.

    Raises:
        SystemExit: the script's, where it failed.
    """
    sys.argv = [script, f"--run_dir={run_dir}", *flags]
    try:
        if script.endswith(".py"):
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
        else:
            del sys.path[0]  # the current directory, which a model's module is looked for in last
            runpy.run_module(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    Path(run_dir, MEASURED).write_text(json.dumps(measured()), encoding="utf-8")


def measured() -> dict[str, object]:
    """The measurements that the training process makes of itself and its machine.

    host_memory_mb: the peak of the process, in 10^6 bytes.
    device_memory_mb: the peak of what TensorFlow took on one GPU, the fullest; None without GPUs.
    gpu: the first GPU's name; None where towers ran on logical CPU devices.
    cores: the processor cores that the process may use.
    """
    import tensorflow as tf

    from towers.machine.devices import count_cores

    gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
    if "--device=cpu" in sys.argv:
        gpus = []
    peaks = [
        tf.config.experimental.get_memory_info(name.removeprefix("/device:"))["peak"] / 1e6
        for name in gpus
    ]
    name = None
    if gpus:
        physical = tf.config.list_physical_devices("GPU")[0]
        details = tf.config.experimental.get_device_details(physical)
        name = details.get("device_name", "GPU")
    return {
        "host_memory_mb": _peak_bytes() / 1e6,
        "device_memory_mb": max(peaks, default=None),
        "gpu": name,
        "cores": count_cores(),
    }


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, else kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    parent.end_with(int(sys.argv[1]))
    main(sys.argv[2], sys.argv[3], sys.argv[4:])
