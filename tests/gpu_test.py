"""Towers on real GPUs, divided into eight logical ones: what no CPU can show.

`pytest -m gpu` where TensorFlow sees a GPU. Elsewhere these tests are skipped; under
TOWERS_REHEARSE_GPUS=1 they run on logical CPU devices, as far as that makes sense, so that the
tests themselves are known to work.
"""

import re
import sys
from subprocess import run

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.conformance.cases import BUILT_IN, ODD
from tests.conformance.gradients_test import keras_gradients, relative_difference
from tests.resuming import FLAGS, ROOT, outcome, train
from tests.step.policy_test import pauses, tower_calls
from towers.machine.devices import GPU, has_gpus
from towers.divide.prefetch import place

L = keras.layers
KIND = "gpu" if has_gpus() else "cpu"
DEVICES = [f"/{KIND}:{index}" for index in range(8)]
CASES = BUILT_IN + ODD if has_gpus() else [BUILT_IN[0], *ODD[:6]]  # conformance/ has the others
# train.py's, in a process of its own
EIGHT = ("--logical_gpus=8", "--device=gpu") if has_gpus() else ("--device=cpu",)

pytestmark = pytest.mark.gpu
on_gpus_alone = pytest.mark.skipif(not has_gpus(), reason="CPUs do not tell this of their memory")


def images(filters=8, size=32):
    """A convolution with few parameters and large activations, its parameters on the CPU."""
    keras.utils.set_random_seed(0)
    layers = [L.Conv2D(filters, 3, activation="relu"), L.GlobalAveragePooling2D(), L.Dense(10)]
    with tf.device("/cpu:0"):
        return keras.Sequential([keras.Input((size, size, 3)), *layers])


def image_batch(count, size=32):
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(count, size, size, 3)).astype("float32"),
        rng.normal(size=(count, 10)).astype("float32"),
    )


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_averaged_gradient_is_the_large_batch_gradient(case, num_devices, float64):
    keras.utils.set_random_seed(7)
    with tf.device("/cpu:0"):
        model = case.build()
        step = towers.TowerStep(
            model, "sgd", **case.compile, num_towers=8, devices=DEVICES[:num_devices]
        )
    compute = keras_gradients(model, case)
    for size in (40, 9, 7):
        batch = case.batch(size, np.random.default_rng(size))
        loss, gradients = step.gradients(*batch)
        expected_loss, expected = compute(batch)
        assert relative_difference(loss, expected_loss) < 1e-10, f"loss, batch {size}"
        for variable, ours, theirs in zip(
            model.trainable_variables, gradients, expected, strict=True
        ):
            assert relative_difference(ours, theirs) < 1e-10, f"{variable.path}, batch {size}"


def test_towers_run_on_their_gpus_and_the_parameters_stay_on_the_cpu():
    step = towers.TowerStep(images(), "adam", "mse", devices=DEVICES, num_towers=6)
    assert step.policy is GPU and step.parameter_device == "/cpu:0"
    step(*image_batch(16))
    placed = [call.device for call in tower_calls(step.traces[-1].graph)]
    wanted = [f"{KIND.upper()}:{t * 8 // 6}" for t in range(6)]
    assert [name[-5:] for name in placed] == wanted
    for variable in [*step.model.variables, *step.optimizer.variables]:
        assert variable.value.device.endswith("CPU:0"), variable.path


def test_shards_are_copied_to_their_gpus_ahead_of_the_step():
    step = towers.TowerStep(images(), "adam", "mse", devices=DEVICES)
    x, y = (tf.constant(part) for part in image_batch(16))
    placed = place(step.machine, (x, y, None))
    for index, (x_shard, _, _) in enumerate(placed):  # TensorFlow calls every logical CPU CPU:0
        assert x_shard.device.endswith(f"GPU:{index}" if has_gpus() else "CPU:0")
    logs = step.train_batch(x, y, placed=placed)
    assert np.isfinite(float(logs["loss"]))


def test_towers_of_different_gpus_run_at_once():
    first, second = pauses(DEVICES[:2], 2)
    assert max(first[0], second[0]) < min(first[1], second[1])


@on_gpus_alone
def test_eight_towers_on_one_gpu_need_the_memory_of_about_one():
    peaks = []
    for num_towers in (1, 8):
        step = towers.TowerStep(
            images(64, 64), "sgd", "mse", devices=DEVICES[:1], num_towers=num_towers
        )
        batch = image_batch(32 * num_towers, 64)
        step(*batch)
        tf.config.experimental.reset_memory_stats("GPU:0")
        before = tf.config.experimental.get_memory_info("GPU:0")["current"]
        step(*batch)
        peaks.append(tf.config.experimental.get_memory_info("GPU:0")["peak"] - before)
    assert peaks[1] < 1.5 * peaks[0], peaks


# Whole runs


def trained(cwd, *flags, fault=""):
    """What a run in cwd/run says on stdout; it ends well, or is killed by the fault."""
    cwd.mkdir(exist_ok=True)
    code, stdout, stderr = train(*flags, cwd=cwd, fault=fault)
    assert code == (-9 if fault else 0), stdout + stderr
    return stdout


@pytest.mark.parametrize(
    "switch",
    [
        "--precision=mixed_float16",
        "--precision=mixed_bfloat16",
        "--jit_compile",
        pytest.param("--variable_device=gpu", marks=on_gpus_alone),
    ],
)
def test_a_run_with_each_switch_has_the_large_batchs_gradient(switch, tmp_path):
    assert "the averaged gradient is the full-batch gradient" in trained(
        tmp_path,
        *EIGHT,
        switch,
        "--num_gpus=8",
        "--model=tests.gpu_test:plain",
        "--dataset=tests.resuming:data",
        "--batch_size=48",
        "--max_steps=2",
        "--verify_gradients",
        "--run_dir=run",
    )


def plain(input_shape, num_classes):
    """Without randomness or BatchNormalization, and small: CPUs compute float16 slowly."""
    return keras.Sequential(
        [
            keras.Input(input_shape),
            L.Conv2D(4, 3, activation="relu"),
            L.Flatten(),
            L.Dense(num_classes, activation="softmax"),
        ]
    )


# Without those of its flags that say what a run is computed on.
ANY = [
    *EIGHT,
    *(f for f in FLAGS if not re.match("--(device|num_gpus|num_towers)=", f)),
    "--deterministic",
]


def test_eight_towers_give_the_same_bits_on_any_number_of_gpus_also_after_a_kill(tmp_path):
    """A run on 2 is killed, and goes on with 4."""
    flags = (*ANY, "--num_towers=8", "--checkpoint_every=1")
    trained(tmp_path / "killed", *flags, "--num_gpus=2", fault="step == 5 and kill('KILL')")
    trained(tmp_path / "killed", "--resume=run", "--trust_run_dir", "--num_gpus=4")
    expected = outcome(tmp_path / "killed/run")
    for num_gpus in (1, 8):
        cwd = tmp_path / str(num_gpus)
        trained(cwd, *flags, f"--num_gpus={num_gpus}")
        assert outcome(cwd / "run") == expected


@on_gpus_alone
def test_too_large_a_batch_for_the_memory_names_the_ways_out(tmp_path):
    code, stdout, stderr = train(
        *EIGHT,
        "--model=tests.gpu_test:hungry",
        "--dataset=tests.resuming:data",
        "--num_gpus=8",
        "--batch_size=48",
        "--max_steps=1",
        "--run_dir=run",
        cwd=tmp_path,
    )
    assert code == 2, stdout + stderr
    assert "error: a device has too little memory for 6 examples a tower" in stderr
    assert "--batch_size" in stderr and "--num_towers=16" in stderr


class Hungry(L.Layer):
    """Needs 32 GiB an example for a moment."""

    def call(self, x):
        return x + 0 * tf.reduce_max(tf.random.stateless_uniform([tf.shape(x)[0], 2**33], [1, 2]))


def hungry(input_shape, num_classes):
    return keras.Sequential(
        [
            keras.Input(input_shape),
            L.Flatten(),
            L.Dense(4),
            Hungry(),
            L.Dense(num_classes, activation="softmax"),
        ]
    )


def test_devices_names_the_gpus_and_their_memory():
    done = run([sys.executable, "train.py", "--devices"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = ("compute capability", "MiB free") if has_gpus() else ("none: ", "CPU")
    for words in wanted:
        assert words in done.stdout
