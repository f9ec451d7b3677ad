"""Logical devices: how many, with which threads, and who may still choose."""

import re

import pytest
import tensorflow as tf

import towers
from tests import processes
from tests.machine.fake_gpus import FakeGpus, use_nvml
from towers.app.config import TrainConfig
from towers.machine import devices, logical, nvidia
from towers.app.training.build import find_devices

# A process of its own, on 8 cores: TensorFlow starts but once, and its threads stay.
FRESH = """
import keras
import tensorflow as tf
import towers
from towers.machine import devices
devices.count_cores = lambda: 8
{code}
threading = tf.config.threading
print(
    len(tf.config.list_logical_devices("CPU")),
    threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads(),
)
"""
MODEL = "keras.Sequential([keras.layers.Dense(3)])"
PARALLEL = f"towers.make_parallel({MODEL}, {{}})"
TRAIN = (
    "from towers.app.training import build; build.find_devices(towers.TrainConfig(num_gpus=2, {}))"
)
LOGICAL = "towers.logical_cpus({})"
THREADING = "tf.config.threading.set_{}_op_parallelism_threads({})"


def devices_and_threads(code):
    """(logical CPU devices, intra-op threads, inter-op threads) after some code."""
    done = processes.run("-c", FRESH.format(code=code))
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


@pytest.mark.parametrize(
    "code, expected",
    [
        (TRAIN.format("num_towers=8"), (2, 1, 8)),
        (LOGICAL.format("2, num_towers=8"), (2, 1, 8)),
        (PARALLEL.format("[0, 3]"), (4, 4, 8)),  # a device without a tower does not count
        (f"{LOGICAL.format(1)}; {PARALLEL.format('4, num_towers=8')}", (4, 1, 8)),
        # what the caller has chosen stays
        (f"{LOGICAL.format(4)}; {TRAIN.format('cpu_threads=7')}", (4, 7, 8)),
        (LOGICAL.format("4, set_threads=False"), (4, 0, 0)),
        (f"{THREADING.format('inter', 3)}; {LOGICAL.format(4)}", (4, 2, 3)),
        (f"{LOGICAL.format(4)}; {THREADING.format('intra', 5)}; {LOGICAL.format(2)}", (2, 5, 8)),
        (f"tf.constant(1); {LOGICAL.format(1)}", (1, 0, 0)),
    ],
)
def test_threads_follow_from_the_towers_unless_the_caller_has_chosen(code, expected):
    assert devices_and_threads(code) == expected


def test_logical_cpus_after_the_start_are_refused_unless_they_are_there():
    tf.config.list_logical_devices()  # starts TensorFlow
    towers.logical_cpus(8)
    with pytest.raises(ValueError, match=r"already started with 8 .*towers.logical_cpus\(4\)"):
        towers.logical_cpus(4)


STEP = "towers.TowerStep(model, 'sgd', 'mse', {})"
RUN = "towers.train(towers.TrainConfig(plan=True, {}), model=model, train=(x, x))"
LATE = """
import os
import keras, numpy as np, towers
from towers.machine import logical
os.dup2(1, 2)  # warnings between the lines that name their statement
logical.count_cores = lambda: 3
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
model.compile("sgd", "mse")
x = np.zeros((8, 3), "float32")
"""
ON_ONE = "%s /cpu:0: .*call towers.logical_cpus\\(%d\\) before .*restart the kernel.*num_towers=1"
ONE, ALL = ON_ONE % ("there is one tower, on", 3), ON_ONE % ("all 2 towers share", 2)


@pytest.mark.skipif(devices.has_gpus(), reason="this machine has a GPU")
def test_towers_on_one_device_that_nobody_chose_are_warned_of():
    """As in a notebook, where a model was made before the devices."""
    statements = [
        (STEP.format("num_towers=2"), ALL),
        (RUN.format("num_towers=2"), ALL),
        ("towers.make_parallel(model, num_towers=2)", ALL),
        ("towers.make_parallel(model, 2)", ALL),
        (STEP.format(""), ONE),
        (RUN.format(""), ONE),
        ("towers.make_parallel(model)", ONE),
        (STEP.format("num_towers=2, devices=['/cpu:0']"), None),
        (RUN.format("num_gpus=1"), None),
        ("towers.make_parallel(model, 1, num_towers=2)", None),
    ]
    lines = [f'print("begins")\n{made}' for made, _ in statements]
    done = processes.run("-c", LATE + "\n".join(lines))
    assert done.returncode == 0, done.stdout
    _, *parts = done.stdout.split("begins\n")
    for (made, warned), part in zip(statements, parts, strict=True):
        said = " ".join(part.split())
        if warned is None:
            assert "/cpu:0: this machine has no GPU" not in said, made
        else:
            assert re.search(warned, said), (made, said)


def test_a_rehearsal_of_gpus_leaves_the_threads_to_tensorflow(monkeypatch):
    monkeypatch.setenv("TOWERS_REHEARSE_GPUS", "1")
    assert devices_and_threads("towers.logical_cpus(4)") == (4, 0, 0)


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"count": 0}, "count"),
        ({"count": 2, "num_towers": 0}, "num_towers"),
    ],
)
def test_counts_below_1_are_refused(arguments, name):
    with pytest.raises(ValueError, match=rf"{name} \(0\) must be at least 1"):
        towers.logical_cpus(**arguments)


def machine_with(free, monkeypatch):
    """GPUs with so many MiB free."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = [("A100", f"GPU-{i}", 81_920, mib) for i, mib in enumerate(free)]
    use_nvml(monkeypatch, *gpus)
    return FakeGpus(len(free), monkeypatch)


@pytest.mark.parametrize(
    "free, count, expected",
    [
        ([12_048, 8_048], 5, [2 * [2000], 3 * [2000]]),
        ([10_000, 40_000], 3, [[3976], 2 * [3976]]),  # nvidia-smi's order is not TensorFlow's
        ([2048 + 512 * 8], 8, [8 * [512]]),
    ],
)
def test_gpus_share_logical_ones_evenly_and_each_gets_as_much_memory(
    free, count, expected, monkeypatch
):
    gpus = machine_with(free, monkeypatch)
    towers.logical_gpus(count)
    assert gpus.memory == expected
    num = f"{len(free)} GPU{'s' * (len(free) > 1)}, {expected[0][0]:,} MiB each"
    assert logical.shared_gpus().startswith(f"{count} logical GPUs on {num}: real kernels")


@pytest.mark.parametrize(
    "free, count, words",
    [
        ([9000] * 4, 2, ["(2) is less than", "GPUs: 4. Ask for at least 4, or hide GPUs"]),
        ([2047 + 512 * 8], 8, ["(8) is too many", ": 511 MiB each", "; 7 would fit. Ask for 7,"]),
        ([5000, 9000], 100, ["(100)", ": 59 MiB each", "; 10 would fit. Ask for 10,"]),
        (
            [2000],
            2,
            [": 0 MiB each", "; 0 would fit. End what else uses the GPU, or leave it out."],
        ),
    ],
)
def test_too_few_or_too_many_logical_gpus_say_how_many_would_fit(free, count, words, monkeypatch):
    machine_with(free, monkeypatch)
    with pytest.raises(ValueError) as error:
        towers.logical_gpus(count)
    assert all(word in str(error.value) for word in ["logical_gpus (", *words])


def test_only_the_visible_gpus_memory_counts(monkeypatch):
    machine_with([12_048, 8_048], monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus = FakeGpus(1, monkeypatch)
    towers.logical_gpus(4)
    assert gpus.memory == [[1500] * 4]


def test_train_py_divides_the_gpus_before_it_looks_for_them(monkeypatch):
    gpus = machine_with([12_048, 8_048], monkeypatch)
    assert find_devices(TrainConfig(logical_gpus=3)) == ["/gpu:0", "/gpu:1", "/gpu:2"]
    assert gpus.memory == [[3000], [3000] * 2]


def test_given_memory_asks_nobody_and_what_is_there_stays(monkeypatch):
    monkeypatch.setattr(nvidia, "driver_gpus", lambda visible: None)
    gpus = FakeGpus(1, monkeypatch)
    assert logical.shared_gpus() is None
    towers.logical_gpus(1)
    assert gpus.limits == {}
    towers.logical_gpus(2, memory_mib=4096)
    towers.logical_gpus(2)
    assert gpus.memory == [[4096] * 2]


@pytest.mark.parametrize("gpus", [[("GB10", "GPU-1", 0, 0), ("T4", "GPU-2", 9000, 9000)], []])
def test_unknown_memory_must_be_given(gpus, monkeypatch):
    use_nvml(monkeypatch, *gpus)
    FakeGpus(1, monkeypatch)
    with pytest.raises(ValueError, match=r"nvidia-smi does not show .*gpus\(8, memory_mib="):
        towers.logical_gpus(8)


@pytest.mark.parametrize(
    "arguments, num_gpus, message",
    [
        ({"count": 0}, 1, r"logical_gpus \(0\) must be at least 1"),
        ({"count": 2, "memory_mib": 0}, 1, r"memory_mib \(0\) must be at least 1"),
        ({"count": 8}, 0, r"logical_gpus \(8\): TensorFlow sees no GPU .*towers.logical_cpus\(8\)"),
        ({"count": 8}, 1, r"logical_gpus \(8\): TensorFlow has already started with 1 GPU"),
    ],
)
def test_gpus_that_cannot_be_divided_say_why(arguments, num_gpus, message, monkeypatch):
    FakeGpus(num_gpus, monkeypatch, has_started=True)
    with pytest.raises(ValueError, match=message):
        towers.logical_gpus(**arguments)
    if num_gpus and arguments["count"]:
        towers.logical_gpus(num_gpus)  # as many as there are
