"""A configuration made real: what it records, what it goes on from, objects; how a step fails."""

import json
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers

from tests.app import run_test
from tests.resuming import FLAGS, outcome, resumed, train
from towers.app.config import TrainConfig
from towers.resume.epoch import Epoch
from towers.app.reporting.report import report_of
from towers.app.training import failures, several_workers
from towers.app.training.build import build, find_devices
from towers.app.training.failures import failures_explained
from towers.app.training.loaded import build_metrics, load_newest
from towers.app.training.task import load_callbacks, PYTHON, UserObjects
from towers.machine import devices as devices_lib
from towers.app import run_dir
from towers.resume import checkpoints, directories
from towers.resume.checkpointer import Checkpointer
from towers.app.run_dir import LOG
from towers.resume.train_state import TrainState
from towers.workers import workers
from towers.workers.cluster import ALONE, Cluster

config = partial(run_test.config, device="cpu")  # 50 examples to train on, 20 to test


def test_a_run_has_its_towers_on_its_devices_and_its_parameters_on_the_cpu():
    run = build(config(num_towers=5))
    assert run.step.devices == ["/cpu:0", "/cpu:1"]
    assert (run.step.num_towers, run.step.parameter_device) == (5, "/cpu:0")
    assert (run.train.num_examples, run.test.num_examples) == (50, 20)
    assert (run.batch_size, run.steps_an_epoch) == (16, 4)  # the last holds 2


def test_the_configuration_is_completed_with_what_defines_the_run():
    run = build(config(batch_size=None, batch_size_per_gpu=7))
    assert run.config.batch_size == run.batch_size == 14
    assert run.config.batch_size_per_gpu is None
    assert run.config.num_towers == 2
    assert run.config.cpu_threads == devices_lib.intra_op_threads()
    assert run.config.epochs == config().epochs


def test_the_seed_alone_decides_the_initial_values():
    kernels = [build(config(seed=seed)).step.model.layers[0].kernel.numpy() for seed in (1, 1, 2)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[0], kernels[2])


def test_the_model_is_compiled_with_the_steps_optimizer():
    run = build(config(optimizer="sgd", learning_rate=0.25))
    assert run.step.model.optimizer is run.step.optimizer
    assert float(run.step.optimizer.learning_rate) == 0.25


def test_without_a_name_the_optimizer_is_the_models_own():
    run = build(config(model="notebook_cnn", dataset="synthetic"))
    assert isinstance(run.step.optimizer, keras.optimizers.RMSprop)


def test_synthetic_examples_have_the_models_shape():
    run = build(config(model="cnn", dataset="synthetic"))
    assert run.train.num_examples == 8192
    x, _ = next(iter(run.train.batches(Epoch(4))))
    assert x.shape == (4, 28, 28, 1)


def test_devices_without_a_tower_are_left_out():
    assert find_devices(config(num_gpus=None, num_towers=3)) == ["/cpu:0", "/cpu:1", "/cpu:2"]


def test_accumulated_towers_take_turns_and_a_run_that_goes_on_knows_both_numbers():
    run = build(config(accumulate=3))
    assert (run.step.num_towers, run.config.num_towers, run.config.accumulate) == (6, 6, 3)
    assert run.step.policy.take_turns
    assert not build(config(num_towers=6)).step.policy.take_turns
    run = build(config(accumulate=3, num_towers=6, num_gpus=3, resume="run"))
    assert (run.step.num_towers, len(run.step.devices)) == (6, 3)


def test_a_step_is_made_again():
    run = build(config(num_towers=2))
    step = run.make_step(strategy="parameter_server")
    assert step.model is run.step.model and step.optimizer is run.step.optimizer


def test_what_was_done_to_the_model_is_noted():
    run = build(config(freeze="body", schedule="cosine"))
    assert run.notes == [
        "2 of 4 trainable variables frozen, 32 parameters",
        "learning rate: cosine to 0 at update 8",
    ]


# What a run goes on from, and what it refuses to go on from
@pytest.fixture(name="run", scope="module")
def _run():
    made = build(config())
    return made._replace(config=config(resume="run"))


@pytest.fixture(name="directory")
def _directory(run, tmp_path):
    directory = run_dir.create(str(tmp_path / "run"), "n", run.config.to_json())
    (directory / directories.CHECKPOINTS).mkdir()
    return directory


def loaded(run, directory):
    checkpointer = Checkpointer(directory, run.workers, pytest.fail)
    data = several_workers.check_same(run)
    return load_newest(run, checkpointer, (), data, {}), checkpointer


def save(run, directory, state):
    _, checkpointer = loaded(run, directory)
    assert checkpointer.found is None
    build_metrics(run, checkpointer)
    checkpointer.save_first(state)


def full_batch(run):
    return int(run.step.full_batch.sizes["train"])


def test_the_newest_checkpoint_is_put_in_place(run, directory):
    kernel = run.step.model.trainable_variables[0]
    save(run, directory, TrainState(step=3, epoch_step=3))
    before = kernel.numpy()
    kernel.assign(before + 1)
    state, checkpointer = loaded(run, directory)
    path, _, damaged = checkpointer.found
    assert (path.name, state.step, damaged) == ("epoch-0-step-3", 3, [])
    np.testing.assert_array_equal(kernel.numpy(), before)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("position", {"phase": 1}, "epoch-0-step-1 is no checkpoint of a run: "),
        ("position", 5, "epoch-0-step-1 is no checkpoint of a run: "),
        ("data", None, "epoch-0-step-1 is no checkpoint of a run: "),
        ("config", 5, "epoch-0-step-1 is no checkpoint of a run: "),
        ("config", {"model": "gru"}, r"another run: .*model \(gru then, .* Restore config.json"),
        (
            "data",
            {"train": "0", "test": "0"},
            "the train data are not those that .* was trained on",
        ),
        ("position", {"results": [[1, 0.5]]}, "a run with other columns than loss"),
    ],
)
def test_what_is_no_checkpoint_of_this_run_is_refused(field, value, words, run, directory):
    save(run, directory, TrainState())
    path = directory / directories.CHECKPOINTS / "epoch-0-step-0"
    state, arrays = checkpoints.read(path)
    newer = path.with_name("epoch-0-step-1")
    checkpoints.write(newer, checkpoints.Checkpoint({**state, field: value}, arrays))
    with pytest.raises(ValueError, match=words):
        loaded(run, directory)


# The parts of several workers that need one process; the others: workers_test.py
CHIEF, OTHER = (Cluster(("a:1", "b:1"), index) for index in (0, 1))


def test_the_chiefs_log_is_the_runs():
    assert [several_workers.log_name(c) for c in (ALONE, CHIEF, OTHER)] == [LOG, LOG, "log-1.txt"]


def test_what_works_with_one_worker_is_refused_for_several(monkeypatch):
    monkeypatch.setattr(workers, "join_workers", lambda: CHIEF)
    with pytest.raises(ValueError, match="^plan=True works with one worker, .* names 2. Unset"):
        towers.train(config(plan=True))


def test_the_other_workers_say_where_their_lines_go_and_nothing_else(capsys):
    out = report_of(OTHER, "its lines go to a file")
    out.line("never seen")
    assert capsys.readouterr().out == ("worker 1 of 2, at b:1: its lines go to a file\n")


def test_who_is_alone_makes_its_directory_and_agrees(tmp_path):
    run = build(config())
    assert several_workers.shared_directory(run, Path("a"), tmp_path) == tmp_path / "a"
    assert list(several_workers.check_same(run)) == ["train", "test"]


# Objects in place of names, and the user's callbacks
MODEL = keras.Sequential([keras.Input((1,))])


def test_an_object_takes_the_place_of_its_name():
    config = TrainConfig(seed=3)
    assert UserObjects().named_in(config) == config
    assert UserObjects(model=MODEL).named_in(config) == TrainConfig(seed=3, model=PYTHON)
    named = UserObjects(MODEL, train=[1]).named_in(config)
    assert (named.model, named.dataset, named.seed) == (PYTHON, PYTHON, 3)


@pytest.mark.parametrize(
    ("objects", "config", "message"),
    [
        (UserObjects(MODEL), {"model": "mlp"}, r"model \(mlp\) is the configuration's"),
        (UserObjects(MODEL), {"resume": "run"}, r"model \(cnn\) is the configuration's"),
        (UserObjects(train=[1]), {"dataset": "music"}, r"dataset \(music\) is the configuration's"),
        (UserObjects(train=[1]), {"data_dir": "x"}, r"data_dir \(x\) has no effect beside `train`"),
        (UserObjects(test=[1]), {}, "`test` needs `train`"),
        (UserObjects(model="mlp"), {}, r"model \('mlp'\) must be a keras.Model"),
        (UserObjects(), {"model": PYTHON}, r"towers.train\(config, \.\.\.\) there"),
    ],
)
def test_what_is_given_twice_or_not_at_all_is_refused(objects, config, message):
    with pytest.raises(ValueError, match=message):
        objects.named_in(TrainConfig(**config))


class Recorder(keras.callbacks.Callback):
    """Hears nothing."""


RETURNED = {
    "nothing": None,
    "two": [Recorder(), keras.callbacks.TerminateOnNaN()],
    "one": Recorder(),
    "classes": [Recorder],
    "backups": [keras.callbacks.BackupAndRestore("backup")],
}
nothing, two, one, classes, backups = (
    lambda returned=value: returned for value in RETURNED.values()
)


def test_a_users_function_brings_callbacks_before_those_of_a_script():
    mine = Recorder()
    assert load_callbacks(f"{__name__}:two", [mine]) == [*RETURNED["two"], mine]
    assert load_callbacks(None) == load_callbacks(None, None) == []
    assert load_callbacks(f"{__name__}:one", mine) == [RETURNED["one"], mine]  # as Keras' fit


@pytest.mark.parametrize(
    "name, message",
    [
        ("classes", "returned <class .*Recorder'>, which is no keras"),
        ("backups", "returned a BackupAndRestore, .*leave BackupAndRestore out"),
        ("nothing", "returned None, which is no keras"),
        ("none", "has no function 'none'"),
    ],
)
def test_what_brings_no_callbacks_is_refused(name, message):
    with pytest.raises(ValueError, match=rf"callbacks \('{__name__}:{name}'\).*{message}"):
        load_callbacks(f"{__name__}:{name}")
    with pytest.raises(ValueError, match="^callbacks hold <class "):
        load_callbacks(None, [Recorder])


# Too little memory names remedies; --deterministic: the same bits twice, or a refusal by name
DATA = ("--dataset=tests.resuming:data", "--device=cpu", "--batch_size=16", "--run_dir=run")


class Clock(keras.layers.Layer):
    """Adds nothing, at a time that no two runs share."""

    def call(self, x):
        return x + 0.0 * tf.cast(tf.timestamp(), x.dtype)


class Noise(keras.layers.Layer):
    """An operation that has no seed."""

    def call(self, x):
        return x + tf.raw_ops.RandomStandardNormal(shape=tf.shape(x), dtype=x.dtype)


class Pool(keras.layers.Layer):
    """A Python function that asks for a seed."""

    def call(self, x):
        return tf.nn.fractional_max_pool(x, [1, 1.5, 1.5, 1])[0]


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


clock, noise, pool = map(_with, (Clock, Noise, Pool))


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
    assert json.loads((second / "run" / "config.json").read_text())["deterministic"] is True


@pytest.mark.matrix
def test_the_profile_of_a_deterministic_step_can_be_taken(tmp_path):
    code, stdout, stderr = train(*FLAGS, "--deterministic", "--profile", cwd=tmp_path)
    assert code == 0 and "whole step" in stdout, stdout + stderr


@pytest.mark.telling("noise-*")
@pytest.mark.parametrize(
    "model, num_gpus, words",
    [
        ("clock", 1, "/mine_1/Timestamp refuses: Timestamp cannot be called when determinism is "),
        ("clock", 2, " refuses: Timestamp cannot be called when determinism is enabled. Leave "),
        (
            "noise",
            1,
            "/mine_1/RandomStandardNormal refuses: When determinism is enabled, random ops",
        ),
        (
            "pool",
            1,
            f"_test.py:{Pool.call.__code__.co_firstlineno + 1}: --deterministic: an operation "
            "refuses: tf.nn.fractional_max_pool requires ",
        ),
    ],
)
def test_an_operation_without_a_deterministic_kernel_is_one_line(model, num_gpus, words, tmp_path):
    code, _, stderr = train(
        *DATA,
        "--deterministic",
        f"--model=tests.app.training.build_test:{model}",
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
        (PLAIN, KeyError("x")),
        (DETERMINISTIC, CANCELLED),
        (DETERMINISTIC, tf.errors.UnimplementedError(None, None, "no kernel for uint3")),
        (DETERMINISTIC, ValueError("the gradient of deterministic_dense/kernel is NaN")),
    ],
)
@pytest.mark.parametrize("log", ["absent", "log.txt"])
def test_other_errors_stay_what_they_are(config, error, log, tmp_path):
    (tmp_path / "log.txt").write_text("another reason")
    with pytest.raises(type(error)) as caught, failures_explained(config, tmp_path / log):
        raise error
    assert caught.value is error
