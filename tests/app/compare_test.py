"""Differences that are planted into runs: compare names the step and what came first."""

import json
import re
import shutil
from contextlib import closing

import keras
import numpy as np
import pytest

import towers
from tests import processes
from tests.app.run_test import NUM_CLASSES, small_data
from towers.app import compare
from towers.app.after_training.replay import audit, replay
from towers.app.reporting.report import Report
from towers.resume import checkpoints

pytestmark = pytest.mark.usefixtures("without_charts")
L = keras.layers
HERE = "tests.app.compare_test"
PLANTED: dict = {}  # what the next run plants, beside its flags
STEP = 9  # from which on it differs, if it is a step's


def model(input_shape, num_classes):
    keras.utils.clear_session()
    built = keras.Sequential(
        [
            keras.Input(input_shape),
            L.Dense(6, activation="relu", name="hidden"),
            L.BatchNormalization(name="norm"),
            L.Dropout(0.3, seed=PLANTED.get("seed", 5), name="drop"),
            L.Dense(num_classes, name="out", activation="softmax"),
        ]
    )
    loss = PLANTED.get("loss", "sparse_categorical_crossentropy")
    built.compile(keras.optimizers.Adam(0.01), loss)
    return built


def data():
    (x, y), test = small_data()
    if "swapped" in PLANTED:
        first, second = PLANTED["swapped"]
        x[[first, second]], y[[first, second]] = x[[second, first]], y[[second, first]]
    if "label" in PLANTED:
        y[PLANTED["label"]] = (y[PLANTED["label"]] + 1) % NUM_CLASSES
    if "pixel" in PLANTED:
        x[PLANTED["pixel"]] += 1 / 255
    return (x, y), test


class Change(keras.callbacks.Callback):
    """Makes a planted change before the step STEP."""

    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == STEP - 1 and "change" in PLANTED:
            PLANTED["change"](self.model)


def callbacks():
    return [Change()]


def train(directory, resume=None, **flags):
    """A run of 16 steps: 4 epochs of 50 examples, which are 3 x 16 + 2."""
    config = {
        "run_dir": str(directory), "model": f"{HERE}:model", "dataset": f"{HERE}:data",
        "callbacks": f"{HERE}:callbacks", "num_gpus": 2, "batch_size": 16, "epochs": 4,
        "ledger": 4, "checkpoint_every": 3, "keep_checkpoints": 100, **flags,
    }  # fmt: skip
    if resume is not None:
        config = {"resume": str(directory), "trust_run_dir": True}
    towers.train(towers.TrainConfig(**config))
    return directory


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(autouse=True)
def nothing_planted():
    yield
    PLANTED.clear()


def compared(first, second, planted=None):
    """The verdict; each run makes its steps again with what was planted into it."""
    calls = []

    def made_again(run, step):
        PLANTED.clear()
        PLANTED.update(planted or {} if len(calls) % 2 else {})
        calls.append(run)
        with closing(Report(open("/dev/null", "w"))) as out:
            return replay({"trust_run_dir": True}, str(run), step, out)

    code, lines = compare.compare(first, second, made_again)
    assert len(calls) <= 4  # two for each run
    return code, "\n".join(lines)


def rate(model):
    model.optimizer.learning_rate.assign(0.005)


def weight(model):
    kernel = model.get_layer("out").kernel
    kernel.assign(np.nextafter(kernel.numpy(), 9).astype("float32"))


def moving_mean(model):
    model.get_layer("norm").moving_mean.assign_add([1e-7] * 6)


def slot(model):
    slot = next(v for v in model.optimizer.variables if v.path.endswith("out_kernel_momentum"))
    slot.assign(2 * slot.numpy())


def seed(model):
    state = model.get_layer("drop").seed_generator.state
    state.assign(state.numpy() + 1)


CAUSES = {
    "two examples swapped": (
        {"swapped": (3, 40)}, {}, "step [1-4] is .*\ncame first: data: the batch",
    ),
    "a label": ({"label": 7}, {}, "step [1-4] is .*\ncame first: data: the batch"),
    "a pixel": ({"pixel": (11, 2)}, {}, "step [1-4] is .*\ncame first: data: the batch"),
    "a moving mean from a step on": (
        {"change": moving_mean}, {}, f"step {STEP} is .*\ncame first: parameters: .*moving_mean",
    ),
    "a slot from a step on": (
        {"change": slot}, {}, f"step {STEP} is .*\ncame first: update: .*out_kernel_momentum",
    ),
    "the seed of a layer": ({"seed": 6}, {}, "noise: model/.*/seed_generator_state, already in"),
    "a learning rate from a step on": (
        {"change": rate}, {}, f"step {STEP} is .*\ncame first: update: .*learning_rate",
    ),
    "a weight from a step on": (
        {"change": weight}, {}, f"step {STEP} is .*\ncame first: parameters: model/.*out/kernel",
    ),
    "a seed from a step on": (
        {"change": seed}, {}, f"step {STEP} is .*\ncame first: noise: model/.*seed",
    ),
    "the number of towers": (
        {}, {"num_towers": 3}, r"setting that differs: num_towers \(2, 3\)\n",
    ),
    "the learning rate": (
        {}, {"learning_rate": 0.02, "optimizer": "adam"}, "came first: update: .*learning_rate",
    ),
}  # fmt: skip


@pytest.mark.telling("a learning rate from a step on")
@pytest.mark.parametrize("planted, flags, expected", CAUSES.values(), ids=CAUSES)
def test_a_planted_difference_is_named(plain, tmp_path, planted, flags, expected):
    PLANTED.update(planted)
    other = train(tmp_path / "run", **flags)
    code, text = compared(plain, other, planted)
    assert code == 1 and re.search(expected, text), text


def test_another_program_is_not_comparable(plain, tmp_path):
    PLANTED["loss"] = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    code, text = compared(plain, train(tmp_path / "run"))
    assert code == 2 and "not comparable: another program (" in text


def test_a_changed_bit_of_a_checkpoint_is_named(plain, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(plain, run)
    folder = run / "checkpoints"
    for path in checkpoints.find(folder):
        if checkpoints.step_of(path) > 6:
            shutil.rmtree(path)
    (folder / "complete").unlink()
    path = checkpoints.find(folder)[0]
    checkpoint = checkpoints.read(path)
    arrays = {key: array.copy() for key, array in checkpoint.arrays.items()}
    changed = next(key for key in arrays if "out/kernel" in key)
    arrays[changed].reshape(-1).view("uint8")[2] ^= 1
    shutil.rmtree(path)
    checkpoints.write(path, checkpoint._replace(arrays=arrays))
    train(run, resume=True)
    code, text = compared(plain, run)
    assert code == 1 and "came first: parameters: model/" in text
    assert f"out/kernel, already in {path.name}" in text


def test_equal_runs_can_be_made_again_on_another_number_of_devices(plain, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(plain, other)
    given = {"trust_run_dir": True}
    with closing(Report(open("/dev/null", "w"))) as out:
        assert audit({**given, "num_gpus": 1}, str(plain), 3, out)
        ledger = (other / "ledger.csv").read_text().splitlines()
        ledger[3] = ledger[3][:-1] + ("0" if ledger[3][-1] != "0" else "1")  # epoch 3, step 12
        (other / "ledger.csv").write_text("\n".join([*ledger, ""]))
        assert not audit(given, str(other), 3, out)
        with pytest.raises(ValueError, match=r"epoch \(9\) is none of the complete epochs"):
            audit(given, str(other), 9, out)
        shutil.rmtree(other / "checkpoints/epoch-2-step-8")
        with pytest.raises(ValueError, match="larger `keep_checkpoints`"):
            audit(given, str(other), 3, out)


def test_an_end_is_named_if_the_schedule_ends_there(plain, tmp_path):
    runs = [tmp_path / name for name in "ab"]
    for schedule, is_named in (("cosine", True), ("constant", False)):
        for run, epochs in zip(runs, (2, 4), strict=True):
            run.mkdir(exist_ok=True)
            shutil.copy(plain / "ledger.csv", run)
            config = {"schedule": schedule, "epochs": epochs, "made_with": None}
            (run / "config.json").write_text(json.dumps(config))
        code, lines = compare.compare(*runs, replay=None)
        assert code == 0 and ("setting that differs: epochs (2, 4)" in lines) == is_named
    (runs[1] / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=f"^{runs[1]}: config.json must be a JSON object"):
        compare.compare(*runs, replay=None)


def test_the_command_says_whether_runs_are_equal(plain, tmp_path):
    done = processes.run("-m", "towers.compare", plain, plain, cwd=tmp_path)
    assert done.returncode == 0 and "equal: all 4 lines that both have" in done.stdout
    ledger = tmp_path / "ledger.csv"
    ledger.write_text("epoch,step,parameters,batch,seeds\n1,4,a,b,c\n")
    done = processes.run("-m", "towers.compare", plain / "ledger.csv", ledger, cwd=tmp_path)
    assert done.returncode == 1 and "came first: data" in done.stdout
    done = processes.run("-m", "towers.compare", plain, cwd=tmp_path)
    assert done.returncode == 2 and "towers-compare RUN_A RUN_B" in done.stderr
    done = processes.run("-m", "towers.compare", plain, "nothing", cwd=tmp_path)
    assert done.returncode == 2 and "error: nothing does not exist" in done.stderr
