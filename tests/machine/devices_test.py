"""What there is to run on, its memory and its name; the errors that say what to do instead."""

from pathlib import Path

import pynvml
import pytest
import tensorflow as tf

from tests.machine.fake_gpus import use_nvml
from towers.machine import devices, nvidia
from towers.machine.devices import CPU, GPU, REHEARSAL
from towers.machine.places import absolute, here, prefix
from towers.machine.words import counted, plural


def test_the_memory_is_the_most_of_a_gpu_or_of_the_process(monkeypatch):
    assert devices.peak_memory(["/cpu:0"]) > 2**26  # TensorFlow alone takes more
    monkeypatch.setattr(
        tf.config.experimental,
        "get_memory_info",
        lambda device: {"current": 5, "peak": {"/gpu:0": 10, "/gpu:1": 30}[device]},
    )
    assert devices.peak_memory(["/gpu:0", "/gpu:1"]) == 30
    monkeypatch.undo()
    assert devices.peak_memory(["/gpu:9"]) > 2**26  # TensorFlow knows nothing of it


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, "cpu"), r"num_gpus \(0\) must be at least 1"),
        ((-1, "cpu"), r"num_gpus \(-1\) must be at least 1"),
        ((9, "cpu"), r"num_gpus \(9\) is more than .* 8 \(/cpu:0, .*towers.logical_cpus\(9\)"),
        ((1, "gpu"), r"no GPU on this machine. Use device=auto"),
        ((1, "tpu"), r"device \('tpu'\) must be one of auto, gpu, cpu"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        devices.tower_devices(*arguments)


@pytest.mark.parametrize(
    "names, message",
    [
        (["/gpu:0"], "'/gpu:0' is not on this machine. It has: /cpu:0, "),
        (["/cpu:8"], "'/cpu:8' is not on this machine"),
        (["/cpu:1", "/device:CPU:1"], "names a device twice"),
        ([], "devices is empty"),
    ],
)
def test_absent_and_doubled_devices_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        devices.check_devices(names)


@pytest.mark.parametrize(
    "wrong, right",
    [
        (2, r"devices=towers.tower_devices\(2\)"),
        ("/cpu:0", r"devices=\['/cpu:0'\]"),
    ],
)
def test_a_count_or_one_name_as_devices_is_an_error_with_the_right_form(wrong, right):
    with pytest.raises(ValueError, match=f"must be a list of names; use {right}.$"):
        devices.device_list(wrong)


@pytest.mark.parametrize(
    "num_towers, num_devices, expected",
    [
        (8, 3, [0, 0, 0, 1, 1, 1, 2, 2]),
        (5, 2, [0, 0, 0, 1, 1]),
        (3, 8, [0, 2, 5]),
    ],
)
def test_towers_take_contiguous_ranges_of_devices(num_towers, num_devices, expected):
    assert devices.place_towers(num_towers, list(range(num_devices))) == expected


def test_towers_fill_devices_by_their_counts_or_an_error_says_the_sum():
    assert devices.place_towers(4, ["/gpu:0", "/gpu:1"], [3, 1]) == ["/gpu:0"] * 3 + ["/gpu:1"]
    for counts in ([3, 2], [4]):
        with pytest.raises(ValueError, match="4 towers for 2 .*Give 2 numbers with this sum"):
            devices.place_towers(4, ["/gpu:0", "/gpu:1"], counts)


@pytest.mark.parametrize(
    "num_towers, num_cores, threads",
    [
        (8, 2, 1),
        (1, 8, 8),
        (3, 8, 2),
    ],
)
def test_threads_follow_from_towers_and_cores(num_towers, num_cores, threads):
    assert devices.cpu_threads(num_towers, num_cores=num_cores) == (threads, num_cores)


@pytest.mark.parametrize(
    "names, value, expected",
    [
        (["/cpu:0"], None, CPU),
        (["/cpu:0"], "0", CPU),
        (["/cpu:0"], "", CPU),
        (["/cpu:0", "/gpu:1"], None, GPU),
        (["/cpu:0"], "1", GPU),
    ],
)
def test_gpus_and_those_that_rehearse_them_have_the_policy_of_gpus(
    names, value, expected, monkeypatch
):
    monkeypatch.delenv(REHEARSAL, raising=False)
    if value is not None:
        monkeypatch.setenv(REHEARSAL, value)
    assert devices.policy_of(names) is expected


@pytest.mark.parametrize(
    "name", ["/cpu:3", "CPU:3", "/device:CPU:3", "/job:worker/replica:0/task:1/device:CPU:3"]
)
def test_a_device_has_one_short_name(name):
    assert devices.short_name(name) == "/cpu:3"


CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
COMPILER = "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
H100 = ("NVIDIA H100 80GB HBM3", "GPU-8932f937", 81559, 80994)
T4 = ("Tesla T4", "GPU-1c2f", 15360, 15000)
GB10 = ("NVIDIA GB10", "GPU-77aa", 0, 0)


@pytest.mark.parametrize(
    "text, version",
    [
        (CLOSED, "550.54.15"),
        (OPEN, "570.86.15"),
        ("", None),
    ],
)
def test_the_kernel_modules_version_is_found(tmp_path, monkeypatch, text, version):
    if text:
        (tmp_path / "version").write_text(text + COMPILER)
    monkeypatch.setattr(nvidia, "DRIVER_VERSION", tmp_path / "version")
    assert nvidia.driver_version() == version


def test_the_gpus_are_those_that_the_driver_lists(monkeypatch):
    use_nvml(monkeypatch, H100, GB10)
    assert nvidia.driver_gpus() == [(0, H100[0], 81559, 80994), (1, GB10[0], None, None)]


@pytest.mark.parametrize(
    "visible, numbers",
    [
        (" GPU-1c2f, 0", [1, 0]),
        ("", [0, 1]),
        (None, [0, 1]),
    ],
)
def test_only_the_visible_gpus_are_asked_for(monkeypatch, visible, numbers):
    use_nvml(monkeypatch, H100, T4)
    found = nvidia.driver_gpus(visible)
    assert [gpu.number for gpu in found] == numbers
    assert [gpu.name for gpu in found] == [(H100, T4)[number][0] for number in numbers]


@pytest.mark.parametrize(
    "gpus, visible, fault",
    [
        *(((H100, T4), visible, {}) for visible in ("2", "-1", "GPU-another", "0,7")),
        ((H100,), None, {"error": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}),
        ((H100,), None, {"seconds": 2}),  # the driver hangs
        ((), None, {}),  # there is no NVML
    ],
)
def test_a_gpu_that_is_not_there_and_a_driver_that_fails_give_none(
    monkeypatch, gpus, visible, fault
):
    use_nvml(monkeypatch, *gpus, **fault)
    monkeypatch.setattr(nvidia, "PATIENCE", 0.2)
    assert nvidia.driver_gpus(visible) is None


@pytest.mark.parametrize(
    "facts, words",
    [
        ((False, True, None), ["built without CUDA"]),
        ((True, False, None), ["no NVIDIA driver"]),
        ((True, False, ""), ["no NVIDIA driver", "CUDA_VISIBLE_DEVICES='' hides GPUs"]),
        ((True, True, "-1,0"), ["CUDA_VISIBLE_DEVICES='-1,0' hides GPUs", "cuda", "--verbosity"]),
        ((True, True, None), ["pip install -e '.[cuda]'", "--verbosity=1"]),
    ],
)
def test_the_reasons_for_no_gpu_are_named(facts, words):
    reasons = nvidia.why_no_gpu(*facts)
    assert len(reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))


def test_a_path_is_that_of_the_moment_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    given = [absolute(path) for path in ("a/b", Path("a"), "/c", "~/d", "~")]
    assert given == [
        tmp_path / "a/b",
        tmp_path / "a",
        Path("/c"),
        Path("/home/me/d"),
        Path("/home/me"),
    ]


def test_a_directory_that_is_gone_is_nowhere(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert here() == Path()


@pytest.mark.parametrize(
    "text, shown",
    [
        ("run: /home/me/runs/x", "run: runs/x"),
        ("--run='/home/me/a b'", "--run='a b'"),
        ("/home/me/a and /home/me/b", "a and b"),
        ("/home/meat/a", "/home/meat/a"),
        ("/mnt/home/me/a", "/mnt/home/me/a"),
        ("/home/me", "/home/me"),
        ("/home/me/.", "."),
    ],
)
def test_what_lies_below_a_directory_is_shown_from_there(text, shown):
    assert prefix(Path("/home/me")).sub("", text) == shown


@pytest.mark.parametrize("directory", [Path("/"), Path()])
def test_in_the_root_paths_stay_whole(directory):
    assert prefix(directory).sub("", "/a/b ./c") == "/a/b ./c"


def test_only_one_is_singular():
    assert [plural("tower", count) for count in (0, 1, 2)] == ["towers", "tower", "towers"]
    assert [counted(n, "step") for n in (0, 1, 1500)] == ["0 steps", "1 step", "1,500 steps"]
