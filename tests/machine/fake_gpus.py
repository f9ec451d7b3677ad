"""TensorFlow on a machine with GPUs, for machines without: which it sees, how they are divided."""

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
