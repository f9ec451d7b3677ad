"""--devices, on the 8 logical CPU devices of the tests."""

import os
import re
import sys

import pytest
import tensorflow as tf

from tests.machine import fake_nvml
from towers.app.config import TrainConfig
from towers.app.diagnosis import device_report as module
from towers.app.diagnosis.device_report import cpu_features, cpu_info, device_report
from towers.machine import nvidia

CPU_INFO = """\
processor\t: 0
model name\t: AMD EPYC
flags\t\t: fpu avx2 avx512f avx512_bf16 fma

processor\t: 1
model name\t: another
"""


def blocks(**values):
    """{label: [lines]}; the title has none."""
    found, last = {}, ""
    for line in device_report(TrainConfig(**values)):
        label, text = line.plain[:10].strip(), line.plain[10:]
        last = label or last
        found.setdefault(last, []).append(text)
    return found


def test_the_title_names_the_versions():
    title = device_report(TrainConfig())[0].plain
    assert title.startswith("towers 0.1.0 | TensorFlow ") and tf.__version__ in title


def test_the_towers_devices_are_those_of_a_run():
    assert blocks(device="cpu", num_gpus=2, num_towers=4)["Devices"] == [
        "parameters on /cpu:0; towers 0-3 on /cpu:0, /cpu:1 (2 each)"
    ]


def test_devices_that_a_run_would_not_get_are_a_line_and_no_error():
    (line,) = blocks(device="cpu", num_gpus=9)["Devices"]
    assert re.match(r"none: (--)?num_gpus \(9\) is more than", line)


def test_what_is_absent_is_said_and_nothing_raises(monkeypatch, tmp_path):
    absent = tmp_path / "absent"
    for name in ("PCI", "DRIVER_VERSION", "LOADED_FILES"):
        monkeypatch.setattr(nvidia, name, absent)
    monkeypatch.setattr(module, "CPU_INFO", absent)
    fake_nvml.use(monkeypatch, None)
    found = blocks()
    assert found["Driver"] == ["not found; nvidia-smi not found, or without an answer"]
    assert found["CPU"][1].startswith("none; oneDNN o")


def test_the_drivers_gpus_are_listed_with_their_memory(monkeypatch, tmp_path):
    gpus = ("Tesla T4", "GPU-1", 15360, 15000), ("NVIDIA GB10", "GPU-2", 0, 0)
    fake_nvml.use(monkeypatch, fake_nvml.build(tmp_path, *gpus))
    monkeypatch.setattr(nvidia, "DRIVER_VERSION", tmp_path / "absent")
    assert blocks()["Driver"] == [
        "550.54.15", "GPU 0  Tesla T4, 15360 MiB, 15000 MiB free",
        "GPU 1  NVIDIA GB10, [N/A] MiB, [N/A] MiB free",
    ]


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_given(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = blocks()
    assert found["GPUs"][0].startswith("none: ")
    assert "CUDA_VISIBLE_DEVICES='' hides every GPU: unset it" in " ".join(found["GPUs"])
    assert found["Variables"][0] == "CUDA_VISIBLE_DEVICES=''"


def test_every_line_but_a_path_fits_100_columns():
    for line in device_report(TrainConfig()):
        assert len(line.plain) <= 100 or os.sep in line.plain


def test_only_the_features_that_kernels_choose_by_are_listed():
    info = cpu_info(CPU_INFO)
    assert info["model name"] == "AMD EPYC"
    assert cpu_features(info["flags"]) == "AVX2, FMA, AVX512F, AVX512_BF16"
    assert cpu_features("fpu sse") == "none"


def test_a_library_is_its_packages_only_where_that_one_is_loaded():
    package = nvidia.Package("nvidia-cudnn-cu12 9.3.0.75", f"{sys.prefix}/lib/libcudnn.so.9")
    library = module.library_line
    assert library(None, None) == "not found"
    assert library(None, package) == "nvidia-cudnn-cu12 9.3.0.75, not loaded: lib/libcudnn.so.9"
    real = os.path.realpath(package.path)
    assert library(real, package).startswith("nvidia-cudnn-cu12 9.3.0.75, loaded: ")
    assert library("/usr/lib/libcudnn.so.9", package) == "loaded: /usr/lib/libcudnn.so.9"
