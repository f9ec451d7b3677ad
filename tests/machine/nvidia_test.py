"""What a machine has of NVIDIA's, from the files and the library that say so."""

import pynvml
import pytest

from tests.machine import fake_nvml
from towers.machine import nvidia

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
COMPILER = "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
H100 = ("NVIDIA H100 80GB HBM3", "GPU-8932f937", 81559, 80994)
T4 = ("Tesla T4", "GPU-1c2f", 15360, 15000)
GB10 = ("NVIDIA GB10", "GPU-77aa", 0, 0)


@pytest.mark.parametrize(("text", "version"), [
    (CLOSED, "550.54.15"), (OPEN, "570.86.15"), ("", None),
])
def test_the_kernel_modules_version_is_found(tmp_path, monkeypatch, text, version):
    if text:
        (tmp_path / "version").write_text(text + COMPILER)
    monkeypatch.setattr(nvidia, "DRIVER_VERSION", tmp_path / "version")
    assert nvidia.driver_version() == version


def test_the_gpus_are_those_that_the_driver_lists(monkeypatch):
    fake_nvml.use(monkeypatch, H100, GB10)
    assert nvidia.driver_gpus() == [(0, H100[0], 81559, 80994), (1, GB10[0], None, None)]


@pytest.mark.parametrize(("visible", "numbers"), [
    ("1", [1]), ("GPU-8932f937", [0]), (" GPU-1c2f, 0", [1, 0]), ("", [0, 1]), (None, [0, 1]),
])
def test_only_the_visible_gpus_are_asked_for(monkeypatch, visible, numbers):
    fake_nvml.use(monkeypatch, H100, T4)
    found = nvidia.driver_gpus(visible)
    assert [gpu.number for gpu in found] == numbers
    assert [gpu.name for gpu in found] == [(H100, T4)[number][0] for number in numbers]


@pytest.mark.parametrize(("gpus", "visible", "fault"), [
    *(((H100, T4), visible, {}) for visible in ("2", "-1", "GPU-another", "0,7")),
    ((H100,), None, {"error": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}),
    ((H100,), None, {"seconds": 2}),  # the driver hangs
    ((), None, {}),  # there is no NVML
])
def test_a_gpu_that_is_not_there_and_a_driver_that_fails_give_none(
    monkeypatch, gpus, visible, fault
):
    fake_nvml.use(monkeypatch, *gpus, **fault)
    monkeypatch.setattr(nvidia, "PATIENCE", 0.2)
    assert nvidia.driver_gpus(visible) is None


@pytest.mark.parametrize(("facts", "words"), [
    ((False, True, None), ["built without CUDA"]),
    ((True, False, None), ["no NVIDIA driver"]),
    ((True, False, ""), ["no NVIDIA driver", "CUDA_VISIBLE_DEVICES='' hides every GPU"]),
    ((True, True, "-1,0"), ["CUDA_VISIBLE_DEVICES='-1,0' hides every GPU"]),
    ((True, True, "7"), ["CUDA_VISIBLE_DEVICES='7' may name no GPU", "cuda", "--verbosity"]),
    ((True, True, None), ["pip install -e '.[cuda]'", "--verbosity=1"]),
])
def test_the_reasons_for_no_gpu_are_named(facts, words):
    reasons = nvidia.why_no_gpu(*facts)
    assert len(reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))
