"""Too little memory names remedies; --deterministic: the same bits twice, or an error by name."""

import json

import keras
import pytest
import tensorflow as tf


from tests.resuming import FLAGS, outcome, resumed, train
from towers.app.config import TrainConfig
from towers.app.training import failures
from towers.app.training.failures import failures_explained


DATA = ("--dataset=tests.resuming:data", "--device=cpu", "--batch_size=16", "--run_dir=run")


class Clock(keras.layers.Layer):
    """Adds nothing, at a time that no two runs share."""

    def call(self, x):
        return x + 0.0 * tf.cast(tf.timestamp(), x.dtype)


class Noise(keras.layers.Layer):
    """An operation that has no seed."""

    def call(self, x):
        return x + tf.raw_ops.RandomStandardNormal(shape=tf.shape(x), dtype=x.dtype)


def _with(layer):
    def model(input_shape, num_classes):
        return keras.Sequential(
            [
                keras.Input(input_shape),
                layer(name="mine"),
                keras.layers.Flatten(),
                keras.layers.Dense(num_classes, activation="softmax"),
            ]
        )

    return model


clock, noise = map(_with, (Clock, Noise))


@pytest.mark.matrix
def test_a_run_gives_the_same_bits_twice_also_when_it_was_killed(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    flags = [*FLAGS, "--deterministic"]
    code, stdout, stderr = train(*flags, "--verify_gradients", "--tensorboard", cwd=first)
    assert code == 0 and "Verify " in stdout, stdout + stderr
    train(*flags, "--checkpoint_every=1", cwd=second, fault="step == 6 and kill('KILL')")
    assert resumed(second) == outcome(first / "run")
    assert json.loads((second / "run/config.json").read_text())["deterministic"] is True


@pytest.mark.telling("noise-*")
@pytest.mark.parametrize(
    "model, num_gpus, words",
    [
        ("clock", 2, " refuses: Timestamp cannot be called when determinism is enabled. Leave "),
        (
            "noise",
            1,
            "/mine_1/RandomStandardNormal refuses: When determinism is enabled, random ops",
        ),
    ],
)
def test_an_operation_without_a_deterministic_kernel_is_one_line(model, num_gpus, words, tmp_path):
    code, _, stderr = train(
        *DATA,
        "--deterministic",
        f"--model=tests.app.training.failures_test:{model}",
        f"--num_gpus={num_gpus}",
        "--num_towers=2",
        cwd=tmp_path,
        anew=num_gpus > 1,
    )  # with two devices, only TensorFlow's messages in the log may name the cause
    assert (code, stderr.count("\n")) == (2, 1), stderr
    assert stderr.startswith("error: ") and "--deterministic: " in stderr and words in stderr
    assert "Leave --deterministic out, or replace that layer" in stderr


GPU = "A deterministic GPU implementation of AdjustContrastv2 is not currently available."
UNSUPPORTED = "Determinism is not yet supported for Dilation2DBackpropFilter."
SEED = "When determinism is enabled, random ops must have a seed specified."


@pytest.mark.parametrize(
    "message, line",
    [
        (
            f"Graph execution error:\n\n{GPU}\n\t [[{{{{node a/b_1/Adjust}}}}]] [Op:__inference_f_1]",
            f"a/b_1/Adjust refuses: {GPU} Leave `deterministic` out, or replace that layer.",
        ),
        (
            f"{{{{function_node __wrapped__Dilation}}}} {UNSUPPORTED} [Op:Dilation2D] name: ",
            f"Dilation2D refuses: {UNSUPPORTED} Leave `deterministic` out, or replace that layer.",
        ),
        (
            f"Exception encountered when calling Noise.call().\n\n\x1b[1m{{{{function_node __w}}}} {SEED} "
            "[Op:RandomStandardNormal] name: \x1b[0m\n\nArguments received",
            f"RandomStandardNormal refuses: {SEED} Leave `deterministic` out, or replace that "
            "layer.",
        ),
        (
            f"W0000 00:00:1.2 3 op_kernel.cc:1834] OP_REQUIRES failed at r.cc:69 : INVALID_ARGUMENT: "
            f"{SEED}\nW0000 CANCELLED\n\t [[{{{{node tower_1/StatefulPartitionedCall/_18}}}}]]",
            f"an operation refuses: {SEED} Leave `deterministic` out, or replace that layer.",
        ),
        (
            f"2 root error(s) found.\n  (0) FAILED_PRECONDITION: {UNSUPPORTED}\n\t [[{{{{node a/Dilate}}}}]]",
            f"a/Dilate refuses: {UNSUPPORTED} Leave `deterministic` out, or replace that layer.",
        ),
    ],
)
def test_a_refusal_is_explained_from_what_tensorflow_says(message, line):
    assert failures.refusal(message) == f"`deterministic`: {line}"


PLAIN = TrainConfig(batch_size=2050, num_towers=2)
DETERMINISTIC = TrainConfig(batch_size=100, num_towers=3, deterministic=True)
EXHAUSTED = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
CANCELLED = tf.errors.CancelledError(None, None, "RecvAsync is cancelled.")
UNIMPLEMENTED = tf.errors.UnimplementedError(None, None, GPU)
LOGGED = f"Data  \xff\nW0000 00:00 UNIMPLEMENTED: {GPU}\nmore\nRESOURCE_EXHAUSTED: Out of memory\n"


@pytest.mark.parametrize(
    "config, error, words",
    [
        (PLAIN, EXHAUSTED, ("1,025 examples a tower", "`batch_size` than 2,050", " num_towers=4")),
        (DETERMINISTIC, EXHAUSTED, ("34 examples a tower", " num_towers=6")),  # the largest shard
        (PLAIN, CANCELLED, ("1,025 examples a tower",)),
        (
            DETERMINISTIC,
            UNIMPLEMENTED,
            ("`deterministic`: an operation refuses: A deterministic GPU",),
        ),
        (DETERMINISTIC, CANCELLED, ("`deterministic`: an operation refuses: A deterministic GPU",)),
    ],
)
def test_a_device_that_fails_is_explained_by_the_error_or_by_the_log_of_a_cancelled_transfer(
    config, error, words, tmp_path
):
    (tmp_path / "log.txt").write_text(LOGGED, encoding="latin-1")
    with pytest.raises(ValueError) as caught, failures_explained(config, tmp_path / "log.txt"):
        raise error
    assert all(word in str(caught.value) for word in words) and caught.value.__cause__ is error


@pytest.mark.parametrize(
    "config, error",
    [
        (PLAIN, UNIMPLEMENTED),
        (DETERMINISTIC, CANCELLED),
        (DETERMINISTIC, ValueError("the gradient of deterministic_dense/kernel is NaN")),
    ],
)
@pytest.mark.parametrize("log", ["absent", "log.txt"])
def test_other_errors_stay_what_they_are(config, error, log, tmp_path):
    (tmp_path / "log.txt").write_text("another reason")
    with pytest.raises(type(error)) as caught, failures_explained(config, tmp_path / log):
        raise error
    assert caught.value is error
