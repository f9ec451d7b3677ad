"""NVIDIA's NVML for machines without a GPU, through the functions of pynvml."""

import time
from types import SimpleNamespace

import pynvml


def use(monkeypatch, *gpus, error=pynvml.NVML_SUCCESS, seconds=0.0):
    """Has NVML list these GPUs for one test; without any, it is not there.

    Each GPU is (name, UUID, MiB, free MiB); 0 MiB if it has no memory of its own. NVML begins with
    this error, and takes so many seconds.
    """
    def begin():
        time.sleep(seconds)
        if error or not gpus:
            raise pynvml.NVMLError(error or pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def one(found):
        if not found:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found[0]

    def memory(gpu):
        if not gpu[2]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=gpu[2] << 20, free=gpu[3] << 20)

    for name, function in {
        "nvmlInit": begin,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda i: one([gpu for gpu in gpus if gpus.index(gpu) == i]),
        "nvmlDeviceGetHandleByUUID": lambda uuid: one([gpu for gpu in gpus if gpu[1] == uuid]),
        "nvmlDeviceGetIndex": gpus.index,
        "nvmlDeviceGetName": lambda gpu: gpu[0],
        "nvmlDeviceGetMemoryInfo": memory,
    }.items():
        monkeypatch.setattr(pynvml, name, function)
