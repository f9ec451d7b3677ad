"""A configuration made real: what it records, what it goes on from, objects; how a step fails."""

from functools import partial

import keras
import numpy as np
import pytest

import towers

from tests.app import run_test
from towers.app.config import TrainConfig
from towers.app.training import several_workers
from towers.app.training.build import build, find_devices
from towers.app.training.loaded import build_metrics, load_newest
from towers.app.training.task import load_callbacks, PYTHON, UserObjects
from towers.machine import devices as devices_lib
from towers.app import run_dir
from towers.resume import checkpoints, directories
from towers.resume.checkpointer import Checkpointer
from towers.resume.train_state import TrainState
from towers.workers import workers
from towers.workers.cluster import Cluster

config = partial(run_test.config, device="cpu")  # 50 examples to train on, 20 to test


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


def test_without_a_name_the_optimizer_is_the_models_own():
    run = build(config(model="notebook_cnn", dataset="synthetic"))
    assert isinstance(run.step.optimizer, keras.optimizers.RMSprop)


def test_devices_without_a_tower_are_left_out():
    assert find_devices(config(num_gpus=None, num_towers=3)) == ["/cpu:0", "/cpu:1", "/cpu:2"]


def test_accumulated_towers_take_turns_and_a_run_that_goes_on_knows_both_numbers():
    run = build(config(accumulate=3))
    assert (run.step.num_towers, run.config.num_towers, run.config.accumulate) == (6, 6, 3)
    assert run.step.policy.take_turns
    assert not build(config(num_towers=6)).step.policy.take_turns
    run = build(config(accumulate=3, num_towers=6, num_gpus=3, resume="run"))
    assert (run.step.num_towers, len(run.step.devices)) == (6, 3)


def test_what_was_done_to_the_model_is_noted():
    run = build(config(freeze="body", schedule="cosine"))
    assert run.notes == [
        "2 of 4 trainable variables frozen, 32 parameters",
        "learning rate: cosine to 0 at update 8",
    ]


# What a run goes on from, and what it refuses to go on from
@pytest.fixture(scope="module")
def run():
    made = build(config())
    return made._replace(config=config(resume="run"))


@pytest.fixture
def directory(run, tmp_path):
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


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("position", {"phase": 1}, "epoch-0-step-1 is no checkpoint of a run: "),
        ("data", None, "epoch-0-step-1 is no checkpoint of a run: "),
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
CHIEF = Cluster(("a:1", "b:1"), 0)


def test_what_works_with_one_worker_is_refused_for_several(monkeypatch):
    monkeypatch.setattr(workers, "join_workers", lambda: CHIEF)
    with pytest.raises(ValueError, match="^plan=True works with one worker, .* names 2. Unset"):
        towers.train(config(plan=True))


# Objects in place of names, and the user's callbacks
MODEL = keras.Sequential([keras.Input((1,))])


def test_an_object_takes_the_place_of_its_name():
    config = TrainConfig(seed=3)
    assert UserObjects().named_in(config) == config
    assert UserObjects(model=MODEL).named_in(config) == TrainConfig(seed=3, model=PYTHON)
    named = UserObjects(MODEL, train=[1]).named_in(config)
    assert (named.model, named.dataset, named.seed) == (PYTHON, PYTHON, 3)


@pytest.mark.parametrize(
    "objects, config, message",
    [
        (UserObjects(MODEL), {"model": "mlp"}, r"model \(mlp\) is the configuration's"),
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
