"""TensorFlow on a machine with GPUs, and NVIDIA's NVML, for machines without."""

import time
from types import SimpleNamespace

import pynvml
import tensorflow as tf

from towers.machine import devices, gpus, logical


class FakeGpus:
    """GPUs called A, B, ...

    visible: the names of those that TensorFlow sees. limits: the logical GPUs of each.
    """

    def __init__(self, count, monkeypatch, has_started=False):
        self.visible, self.limits = list("ABCD"[:count]), {}
        for name, function in (
            ("get_visible_devices", lambda kind: self.visible),
            ("set_visible_devices", self._show),
            ("get_logical_device_configuration", self.limits.get),
            ("set_logical_device_configuration", self.limits.__setitem__),
        ):
            monkeypatch.setattr(tf.config, name, function)
        for module in (devices, logical):
            monkeypatch.setattr(module, "has_gpus", lambda: count > 0)
        for module in (gpus, logical):
            monkeypatch.setattr(module, "has_started", lambda: has_started)
        monkeypatch.setattr(gpus, "device_names", self._names)

    def _show(self, names, kind):
        assert kind == "GPU"
        self.visible = names

    def _names(self, kind):
        count = sum(len(self.limits.get(name, [None])) for name in self.visible)
        return [f"/{kind}:{index}" for index in range(count)]

    @property
    def memory(self):
        """MiB of each GPU's logical GPUs."""
        return [[limit.memory_limit for limit in self.limits[name]] for name in self.visible]


def use_nvml(monkeypatch, *gpus, error=pynvml.NVML_SUCCESS, seconds=0.0):
    """Has NVML list these GPUs for one test; without any, NVML is missing.

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
