"""What a machine has of NVIDIA's, from the files and the library that say so."""

from pathlib import Path

import pynvml
import pytest

from tests.machine import fake_nvml
from towers.machine import nvidia

CLOSED = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""


H100 = ("NVIDIA H100 80GB HBM3", "GPU-8932f937", 81559, 80994)
T4 = ("Tesla T4", "GPU-1c2f", 15360, 15000)
GB10 = ("NVIDIA GB10", "GPU-77aa", 0, 0)


@pytest.mark.parametrize(
    ("text", "version"), [(CLOSED, "550.54.15"), (OPEN, "570.86.15"), ("", None)]
)
def test_the_kernel_modules_version_is_found(tmp_path, monkeypatch, text, version):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(nvidia, "DRIVER_VERSION", tmp_path / "version")
    assert nvidia.driver_version() == version


def test_without_the_drivers_file_there_is_no_version(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia, "DRIVER_VERSION", tmp_path / "absent")
    assert nvidia.driver_version() is None


def test_the_gpus_are_those_that_the_driver_lists(tmp_path, monkeypatch):
    fake_nvml.use(monkeypatch, fake_nvml.build(tmp_path, H100, GB10))
    assert nvidia.driver_gpus() == [
        (0, "NVIDIA H100 80GB HBM3", 81559, 80994, "550.54.15"),
        (1, "NVIDIA GB10", None, None, "550.54.15"),
    ]


@pytest.mark.parametrize(("visible", "numbers"), [
    ("1", [1]), ("GPU-8932f937", [0]), (" GPU-1c2f, 0", [1, 0]), ("", [0, 1]), (None, [0, 1]),
])
def test_only_the_visible_gpus_are_asked_for(tmp_path, monkeypatch, visible, numbers):
    fake_nvml.use(monkeypatch, fake_nvml.build(tmp_path, H100, T4))
    found = nvidia.driver_gpus(visible)
    assert [gpu.number for gpu in found] == numbers
    assert [gpu.name for gpu in found] == [(H100, T4)[number][0] for number in numbers]


@pytest.mark.parametrize("visible", ["2", "-1", "GPU-another", "0,7"])
def test_a_gpu_that_is_not_there_gives_none(tmp_path, monkeypatch, visible):
    fake_nvml.use(monkeypatch, fake_nvml.build(tmp_path, H100, T4))
    assert nvidia.driver_gpus(visible) is None


@pytest.mark.parametrize(
    "fault", [{"init": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}, {"seconds": 2}], ids=str
)
def test_a_driver_that_fails_or_hangs_gives_none(tmp_path, monkeypatch, fault):
    fake_nvml.use(monkeypatch, fake_nvml.build(tmp_path, H100, **fault))
    monkeypatch.setattr(nvidia, "PATIENCE", 0.2)
    assert nvidia.driver_gpus() is None


def test_without_nvml_there_are_none(monkeypatch):
    fake_nvml.use(monkeypatch, None)
    assert nvidia.driver_gpus() is None


@pytest.mark.parametrize(
    ("vendor", "kind", "found"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x1002", "0x030000", False)],
)
def test_a_card_is_a_display_controller_of_nvidias(tmp_path, monkeypatch, vendor, kind, found):
    device = tmp_path / "0000:00:01.0"
    device.mkdir()
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")
    (tmp_path / "0000:00:00.0").mkdir()  # without files: skipped
    monkeypatch.setattr(nvidia, "PCI", tmp_path)
    assert nvidia.has_card() is found


def test_without_a_pci_bus_there_is_no_card(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia, "PCI", tmp_path / "absent")
    assert not nvidia.has_card()


def test_loaded_libraries_are_those_of_this_process():
    path = nvidia.loaded_libraries()["libtensorflow_framework"]
    assert Path(path).is_file()


def test_without_the_list_of_loaded_files_none_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia, "LOADED_FILES", tmp_path / "absent")
    assert nvidia.loaded_libraries() == {}


def test_pip_libraries_are_found_with_their_packages_version(tmp_path, monkeypatch):
    info = tmp_path / "nvidia_cudnn_cu12-9.3.0.75.dist-info"
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: nvidia-cudnn-cu12\nVersion: 9.3.0.75\n"
    (info / "METADATA").write_text(metadata)
    (info / "RECORD").write_text("nvidia/cudnn/lib/libcudnn.so.9,,\nnvidia/cudnn/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = str(tmp_path / "nvidia/cudnn/lib/libcudnn.so.9")
    assert nvidia.pip_libraries()["libcudnn"] == ("nvidia-cudnn-cu12 9.3.0.75", path)


def test_nccl_and_the_driver_are_not_what_tensorflow_needs_to_see_a_gpu():
    assert nvidia.missing_libraries(["libcudart", "libcublas", "libcudnn"]) == []
    assert nvidia.missing_libraries(["libcudart", "libnccl"]) == ["cuBLAS", "cuDNN"]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((False, True, True, None, ()), ["built without CUDA"]),
        ((True, False, False, None, ["CUDA"]), ["no NVIDIA GPU on the PCI bus, and no driver"]),
        ((True, True, False, None, ()), ["has no driver"]),
        ((True, True, True, None, ["cuDNN"]), ["cuDNN not found: pip install -e '.[cuda]'"]),
        ((True, True, True, "", ()), ["CUDA_VISIBLE_DEVICES='' hides every GPU"]),
        ((True, True, True, "-1,0", ()), ["CUDA_VISIBLE_DEVICES='-1,0' hides every GPU"]),
        ((True, True, True, "7", ()), ["CUDA_VISIBLE_DEVICES='7' may name no GPU"]),
        ((True, False, False, "", ()), ["no driver", "hides every GPU"]),
        ((True, True, True, None, ()), ["--verbosity=1"]),
    ],
)
def test_the_reason_for_no_gpu_is_named(facts, words):
    reasons = nvidia.why_no_gpu(*facts)
    assert len(reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))
