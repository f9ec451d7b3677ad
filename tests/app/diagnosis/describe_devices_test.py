"""--devices, on the 8 logical CPU devices of the tests."""

import re

import pytest
import tensorflow as tf

from tests.machine import fake_nvml
from towers.app.config import TrainConfig
from towers.app.diagnosis.describe import device_report
from towers.machine import nvidia


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(nvidia, "DRIVER_VERSION", tmp_path / "absent")
    fake_nvml.use(monkeypatch)


def blocks(**values):
    """{label: [lines]} of all but the title."""
    found, last = {}, ""
    for line in device_report(TrainConfig(**values))[1:]:
        last = line[:10].strip() or last
        found.setdefault(last, []).append(line[10:])
    return found


def test_the_title_names_the_versions_and_the_towers_devices_are_those_of_a_run():
    title = device_report(TrainConfig())[0]
    assert title.startswith("towers ") and tf.__version__ in title
    assert blocks(device="cpu", num_gpus=2, num_towers=4)["Devices"] == [
        "parameters on /cpu:0; towers 0-3 on /cpu:0, /cpu:1 (2 each)"
    ]


def test_devices_that_a_run_would_not_get_are_a_line_and_no_error():
    (line,) = blocks(device="cpu", num_gpus=9)["Devices"]
    assert re.match(r"none: (--)?num_gpus \(9\) is more than", line)


def test_the_drivers_gpus_are_listed_with_their_memory(monkeypatch):
    assert blocks()["Driver"] == ["not found"]
    gpus = ("Tesla T4", "GPU-1", 15360, 15000), ("NVIDIA GB10", "GPU-2", 0, 0)
    fake_nvml.use(monkeypatch, *gpus)
    assert blocks()["Driver"] == [
        "found", "GPU 0  Tesla T4, 15360 MiB, 15000 MiB free",
        "GPU 1  NVIDIA GB10, [N/A] MiB, [N/A] MiB free",
    ]


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_without_a_gpu_the_reasons_are_given(monkeypatch):
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    first, second = blocks()["GPUs"]
    assert first.startswith("none: no NVIDIA driver")
    assert second == "CUDA_VISIBLE_DEVICES='' hides every GPU: unset it"
