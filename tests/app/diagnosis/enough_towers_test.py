"""num_towers=auto: the run that it begins is the run with the number given."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import towers
from tests.app import run_test
from tests.bits import bits
from towers import TowerStep
from towers.app import compare
from towers.app.diagnosis import memory
from towers.resume import checkpoints
from towers.step.sharding import shard_sizes

pytestmark = pytest.mark.usefixtures("in_an_empty_directory", "without_charts")
HERE, L = "tests.app.diagnosis.enough_towers_test", keras.layers
ROOT = Path(__file__).parents[3]


class Drawn(L.Layer):
    """Draws by tf.random, whose state nobody can save or set back."""

    def call(self, x):
        return x + 0.1 * tf.random.normal(tf.shape(x), seed=3)


def model(input_shape, num_classes, *noise):
    keras.utils.clear_session()
    return keras.Sequential(
        [
            keras.Input(input_shape),
            L.BatchNormalization(name="norm"),
            *noise,
            L.Dropout(0.3, name="drop"),
            L.Dense(num_classes, activation="softmax", name="out"),
        ]
    )


def compiled(input_shape, num_classes):
    built = model(input_shape, num_classes)
    built.compile(
        keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return built


def drawing(input_shape, num_classes):
    return model(input_shape, num_classes, Drawn(name="noise"))


def deep(input_shape, num_classes):
    """Its towers meet again and again, and keep what their backward passes need."""
    blocks = [layer for _ in range(8) for layer in (L.Dense(64), L.BatchNormalization(), L.ReLU())]
    return keras.Sequential(
        [keras.Input(input_shape), *blocks, L.Dense(num_classes, activation="softmax")]
    )


def config(directory, **values):
    """4 steps: 50 = 3 x 16 + 2."""
    small = {
        "model": f"{HERE}:model", "run_dir": directory, "epochs": 1, "batch_norm": "average",
        "ledger": 1, "checkpoint_every": 1, "keep_checkpoints": 100,
    }  # fmt: skip
    return run_test.config(**{**small, **values})


@pytest.fixture
def limit(monkeypatch):
    """Lets steps run out of memory when a tower has more rows: at their end, after all effects."""

    def limited(most):
        def train_batch(step, x, *args, **kwargs):
            logs = real(step, x, *args, **kwargs)
            if max(shard_sizes(len(x), step.num_towers)) > most:
                raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
            return logs

        monkeypatch.setattr(TowerStep, "train_batch", train_batch)

    real = TowerStep.train_batch
    return limited


def states(directory):
    """The bits of all variables in each checkpoint, by its name, and the lines of the ledger."""
    found = {}
    for path in checkpoints.find(Path(directory, "checkpoints")):
        arrays = checkpoints.read(path).arrays
        found[path.name] = {name: bits(value) for name, value in arrays.items()}
    assert "epoch-0-step-0" in found and len(found) > 3
    return found, Path(directory, "ledger.csv").read_text()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "values, most, num_towers",
    [
        ({"model": f"{HERE}:drawing"}, 4, 4),
        ({"model": f"{HERE}:compiled"}, 8, 2),
        ({"strategy": "mirrored", "nonfinite": "skip"}, 4, 4),
        ({"noise_scale": True, "ema": 0.9}, 8, 2),
    ],
    ids=["noise", "a compiled model", "copies", "averages"],
)
def test_a_run_has_the_bits_of_a_run_with_the_number_given(
    values, most, num_towers, limit, monkeypatch, capsys
):
    if "strategy" in values:  # the CPU's devices need no copies
        monkeypatch.setenv("TOWERS_REHEARSE_GPUS", "1")
    towers.train(config("given", num_towers=num_towers, **values))
    assert "Towers " not in capsys.readouterr().out
    limit(most)
    towers.train(config("auto", num_towers="auto", **values))
    said = "Towers    a device has too little memory for 8 examples a tower: trying 4 towers"
    assert (said in capsys.readouterr().out) == (num_towers == 4)
    assert states("auto") == states("given")
    saved = json.loads(Path("auto", "config.json").read_text())
    assert (saved["num_towers"], saved["accumulate"]) == (num_towers, num_towers // 2)


def test_a_run_goes_on_with_the_number_that_it_found(limit):
    towers.train(config("given", num_towers=4))
    limit(4)
    script = {"num_towers": "auto", "resume": "auto", "trust_run_dir": True}
    towers.train(config("auto", max_steps=1, **script))
    towers.train(config("auto", max_steps=4, **script))
    assert states("auto")[1] == states("given")[1]
    assert compare.compare(Path("auto"), Path("given"), None)[0] == 0


@pytest.mark.parametrize(
    "values, most, message",
    [
        ({"batch_size": 4}, 0, "too little memory for 1 example a tower. Use a smaller model"),
        (
            {"model": f"{HERE}:deep", "batch_norm": "synchronized"},
            4,
            "8 examples a tower, and more towers need as much, .* Use a smaller `batch_size` than 16, "
            "or batch_norm=average",
        ),
        ({"accumulate": 2}, 4, r"num_towers \(auto\) one of all devices: give only one of them"),
    ],
)
def test_an_error_says_what_helps_when_towers_do_not_and_leaves_no_directory(
    values, most, message, limit
):
    limit(most)
    with pytest.raises(ValueError, match=message):
        towers.train(config("auto", **{"num_towers": "auto", **values}))
    assert not Path("auto").exists()


KIB = 3  # of a device's memory: two towers of 25 examples do not fit


def planned(capsys, **values):
    """The number of towers, the rows of the largest one, and how many a tower could have."""
    towers.train(config("plan", plan=True, batch_size=50, **values))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    count = next(int(words[4]) for words in lines if words[:1] == ["Batch"])
    most = [words[-1] for words in lines if words[:1] in (["/cpu:0"], ["/cpu:1"])]
    return count, -(-50 // count), [int(rows) for rows in most[-2:] if rows.isdecimal()]


def test_it_starts_with_the_fewest_towers_that_are_estimated_to_fit(monkeypatch, capsys):
    monkeypatch.setattr(memory, "memory_limit", lambda device: KIB * 1024)
    count, rows, most = planned(capsys, num_towers="auto")
    assert count > 2 and count % 2 == 0 and rows <= min(most)
    _, rows, most = planned(capsys, accumulate=count // 2 - 1)
    assert rows > min(most)


@pytest.mark.parametrize("kib", [None, 1])
def test_it_starts_with_one_tower_a_device_without_an_estimate_that_fits(kib, monkeypatch, capsys):
    """None: nobody knows the memory of a device."""
    monkeypatch.setattr(memory, "memory_limit", lambda device: kib and kib * 1024)
    assert planned(capsys, num_towers="auto")[0] == 2


class Greedy(L.Layer):
    """Takes 50 MB for each example, and gives them back."""

    def call(self, x):
        tiled = tf.tile(tf.stop_gradient(x), [1, 2**22])
        return x + tf.reduce_max(tiled, axis=1, keepdims=True)


def greedy(input_shape, num_classes):
    return keras.Sequential(
        [keras.Input(input_shape), Greedy(), L.Dense(num_classes, activation="softmax")]
    )


LIMITED = """
import resource, sys
from towers.app import __main__ as command
from towers.divide.tower_step import TowerStep

def train_batch(step, *args, real=TowerStep.train_batch, **kwargs):
    words = open("/proc/self/status").read().split()
    used = int(words[words.index("VmSize:") + 1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.RLIM_INFINITY))
    try:
        return real(step, *args, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

TowerStep.train_batch = train_batch
sys.exit(command.main(sys.argv))
"""


def test_a_process_without_further_memory_doubles_its_towers():
    """Linux refuses more than 1 GiB. With oneDNN, TensorFlow would keep its requests large."""
    flags = (
        f"--model={HERE}:greedy --dataset=tests.app.run_test:small_data --batch_size=32 "
        "--max_steps=1 "
        "--num_gpus=2 --num_towers=auto --device=cpu --run_dir=run"
    )
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *flags.split()],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_ENABLE_ONEDNN_OPTS": "0"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": trying ") == 1
    assert json.loads(Path("run", "config.json").read_text())["num_towers"] == 4
