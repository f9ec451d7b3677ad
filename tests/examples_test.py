"""Tests that each example runs and learns, and that each packaged flag file is a valid run."""

import csv
import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from tests import processes
from towers import TrainConfig
from towers.app import datasets, models

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]
# Without a GPU, a second CPU device takes the place of GPU 0: TensorFlow's default device.
RUN = """
import keras, tensorflow as tf, towers
from examples import {name}
if not tf.config.list_physical_devices("GPU"):
    towers.logical_cpus(2)
    tf.device("/cpu:1").__enter__()
print(json.dumps({name}.main({arguments})))
"""
HAS_LOSSES = ["loss"]
HAS_ACCURACIES = ["accuracy", "loss", "val_accuracy", "val_loss"]

# The arguments of each example's main, and the names in the history that it returns.
SMALLER = {
    "wide_mlp": ("examples=600, inputs=100, widths=(50, 20), epochs=2", HAS_LOSSES),
    "melodies": ("examples=300, epochs=2, layer=keras.layers.LSTM, units=8", HAS_ACCURACIES),
    "two_inputs": ("pairs=1200, epochs=2", HAS_ACCURACIES),
    "transfer": (
        "examples=128, epochs=2, application=keras.applications.MobileNet",
        HAS_ACCURACIES,
    ),
    "autoencoder": ("examples=1500, epochs=2", ["loss", "val_loss"]),
    "gan": (
        "examples=400, epochs=2, directory=sys.argv[1]",
        ["discriminator_loss", "generator_loss"],
    ),
    "vae": ("examples=1500, epochs=2", ["divergence", "loss", "val_divergence", "val_loss"]),
    "distillation": ("examples=600, epochs=2", HAS_ACCURACIES),
    "contrastive": ("examples=800, epochs=2", HAS_LOSSES),
}
PRINTS = {
    "wide_mlp": "6,091 parameters, 600 examples,",  # 101 x 50 + 51 x 20 + 21
    "melodies": ", actual ",
    "vae": "standard deviations of 1,500 codes",
    "distillation": "\nstudent: test accuracy 0.",
    "contrastive": "linear probe: towers 0.",
}
TRACKERS = sorted(path.stem for path in (ROOT / "examples/trackers").glob("with_*.py"))
HUB = "lora"  # needs KerasHub and has a test of its own
COMPARISON = "what_others_get_wrong"  # compares weights and returns no history
FALLING = {"gan": "discriminator_loss"}  # the loss that must fall; by default "loss"


def run(code, *arguments, cwd=ROOT):
    """Runs code whose last output line is JSON; returns (its value, the process)."""
    start = f"import json, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    done = processes.run("-c", start + code, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done


def test_every_example_is_tested():
    assert {*SMALLER, COMPARISON, HUB} == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.telling("autoencoder", "wide_mlp")
@pytest.mark.parametrize("name", SMALLER)
def test_an_example_runs_and_learns(name, tmp_path):
    arguments, names = SMALLER[name]
    history, done = run(RUN.format(name=name, arguments=arguments), str(tmp_path))
    assert "its own rows" not in done.stderr  # no false warning
    assert sorted(history) == names
    assert np.shape(list(history.values())) == (len(names), 2)  # two epochs each
    assert np.isfinite(list(history.values())).all()
    falling = FALLING.get(name, "loss")
    assert history[falling][1] < history[falling][0]
    assert PRINTS.get(name, "Epoch 2/2") in done.stdout
    assert done.stdout.count("Epoch ") == 2
    if name == "gan":  # it draws a grid of digits after each epoch
        grids = [plt.imread(tmp_path / f"epoch_{epoch}.png") for epoch in (1, 2)]
        assert grids[0].shape == (168, 168) and np.any(grids[0] != grids[1])


# Keras makes adapters in float32; in float64, rounding hides no difference.
ADAPTERS = """
import h5py, keras, numpy as np

keras.config.set_floatx("float64")
from examples import lora

add_weight = keras.layers.EinsumDense.add_weight
keras.layers.EinsumDense.add_weight = lambda *args, **options: add_weight(
    *args, **{**options, "dtype": "float64"}
)
backbones, files = [], [f"{sys.argv[1]}/{devices}.lora.h5" for devices in (1, 2)]
build = lora.build_backbone
lora.build_backbone = lambda: backbones.append(build(width=16)) or backbones[-1]
histories = [lora.main(150, 2, file, devices) for devices, file in enumerate(files, 1)]
names = []
with h5py.File(files[1]) as opened:
    opened.visititems(lambda name, item: names.append(name.split("/")[-1])
                      if isinstance(item, h5py.Dataset) and item.ndim else None)
one, two = ({w.path: w.numpy() for w in b.trainable_weights} for b in backbones)
assert list(one) == list(two)
differences = [float(np.abs(one[path] - two[path]).max()) for path in one]
moved = [float(np.abs(value).max()) for path, value in two.items() if "lora_kernel_b" in path]

inputs, _ = lora.make_data(lora.music.load().train[0][:8], 6)
expected = backbones[1].predict(inputs, verbose=0)
for weight in backbones[1].trainable_weights:
    weight.assign(np.zeros(weight.shape))
forgotten = backbones[1].predict(inputs, verbose=0)
backbones[1].load_lora_weights(files[1])
loaded = backbones[1].predict(inputs, verbose=0)
print(json.dumps({
    "differences": differences, "moved": moved, "losses": [h["loss"] for h in histories],
    "names": sorted(set(names)),
    "forgotten": float(np.abs(forgotten - expected).max()),
    "loaded": float(np.abs(loaded - expected).max()),
}))
"""


def test_adapters_trained_on_two_devices_equal_one_devices_and_are_saved_alone(tmp_path):
    pytest.importorskip("keras_hub", reason="pip install 'tf-towers[text]'")
    found, done = run(ADAPTERS, str(tmp_path))
    assert max(found["differences"]) <= 1e-10 < 1e-3 < min(found["moved"])
    assert found["names"] == ["lora_kernel_a", "lora_kernel_b"] and len(found["moved"]) == 4
    for one, two in zip(*found["losses"], strict=True):
        assert two == pytest.approx(one, rel=1e-10)
    assert found["losses"][1][1] < found["losses"][1][0]
    assert found["loaded"] <= 1e-6 < 1e-3 < found["forgotten"]  # the file holds float32
    assert "parameters are trained" in done.stdout


@pytest.mark.parametrize("name", [*SMALLER, COMPARISON, HUB, *TRACKERS])
def test_an_example_documents_its_command(name):
    package = "examples.trackers" if name in TRACKERS else "examples"
    path = f"{package.replace('.', '/')}/{name}.py"
    text = (ROOT / path).read_text("utf-8")
    assert f"python -m {package}.{name}\n" in text
    assert text.endswith('\n\nif __name__ == "__main__":\n    main()\n')
    if name in TRACKERS:
        assert f"`{path}`" in (ROOT / "docs/trackers.md").read_text("utf-8")


@pytest.mark.matrix
def test_towers_equals_one_device_in_cases_where_mirrored_strategy_does_not():
    rows, done = run(
        "from examples import what_others_get_wrong as example\nexample.DEVICES = 2\n"
        "print(json.dumps(list(example.main(epochs=1).values())))"
    )
    for row in rows:
        assert row["Keras, 1 device"] <= 1e-15 and row["towers"] <= 1e-15
    even, *differing, accumulated = (row["MirroredStrategy"] for row in rows)
    assert even <= 1e-15 and min(differing) > 1e-3 and accumulated is None
    assert "MirroredStrategy: RuntimeError: " in done.stdout


def scalars(directory, tag):
    """Returns [(step, value), ...] of a scalar in an event file."""
    events = EventAccumulator(str(directory)).Reload()
    return [
        (event.step, tensor_util.make_ndarray(event.tensor_proto).item())
        for event in events.Tensors(tag)
    ]


def results(directory, column):
    with open(directory / "results.csv", encoding="utf-8") as file:
        return [float(row[column]) for row in csv.DictReader(file)]


@pytest.mark.matrix
def test_tensorboard_has_a_value_for_each_epoch_of_a_fit_and_of_a_run(tmp_path):
    history, _ = run(
        "from examples.trackers import with_tensorboard as t\nprint(json.dumps(t.main(2, 600)))",
        cwd=tmp_path,
    )
    logs = tmp_path / "logs"
    for split, name in (("train", "loss"), ("validation", "val_accuracy")):
        shown = scalars(logs / "train" / split, f"epoch_{name.removeprefix('val_')}")
        assert [step for step, _ in shown] == [0, 1]
        np.testing.assert_allclose([value for _, value in shown], history[name], rtol=1e-6)
        np.testing.assert_allclose(results(logs / "run", name), history[name], rtol=1e-5)
    losses = [value for _, value in scalars(logs / "fit/train", "epoch_loss")]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert list((logs / "run/tensorboard").iterdir())  # written by tensorboard=True


def test_optuna_prunes_bad_trials_and_reads_the_accuracy_of_the_others(tmp_path):
    trials, _ = run(
        "from examples.trackers import with_optuna as o\n"
        "print(json.dumps([(t.state.name, t.value, list(t.intermediate_values.values()))"
        " for t in o.main(3, 2, 600).trials]))",
        cwd=tmp_path,
    )
    states = {state for state, _, _ in trials}
    assert states == {"COMPLETE", "PRUNED"}
    for number, (state, value, reported) in enumerate(trials):
        directory = tmp_path / "study" / f"trial-{number:03}"
        accuracies = results(directory, "val_accuracy")
        assert len(accuracies) == len(reported)
        np.testing.assert_allclose(reported, accuracies, rtol=1e-5)
        is_complete = state == "COMPLETE"
        assert (directory / "final.keras").exists() == is_complete == (len(accuracies) == 2)
        np.testing.assert_allclose(value, max(reported) if is_complete else reported[-1])


FILES = sorted((ROOT / "towers/app/experiments").glob("*.flags"))
SWEEPS = [path for path in FILES if path.stem.endswith("_sweep")]
RUNS = [path for path in FILES if path not in SWEEPS]

# Flags are global to a process, so another process reads the files, one after another.
PARSE_RUNS = """
import json, sys
from absl import flags
from towers.app import __main__ as train

train.define_flags()
for path in sys.argv[1:]:
    flags.FLAGS.unparse_flags()
    print(train.parse_flags(["train.py", f"--flagfile={path}"]).to_json().replace("\\n", " "))
"""
PARSE_SWEEPS = """
import json, sys
from absl import flags
from towers.app import command_line
from towers.app.config import TrainConfig
from towers.app.sweep import __main__ as sweep
from towers.app.sweep.run_cells import make_cells

sweep.define_flags()
for path in sys.argv[1:]:
    flags.FLAGS.unparse_flags()
    command_line.parse_flags(["sweep.py", f"--flagfile={path}"])
    given = flags.FLAGS
    cells = make_cells(
        given.model, given.batch_sizes, given.gpu_counts, TrainConfig()
    )
    print(json.dumps([len(cells), given.model, given.dataset, given.epochs]))
"""


def parse(code, paths):
    """Returns the JSON values that the code prints, one for each file."""
    done = processes.run("-c", code, *paths)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def configs():
    """{name of the file: TrainConfig}."""
    values = parse(PARSE_RUNS, RUNS)
    return {p.stem: TrainConfig(**value) for p, value in zip(RUNS, values, strict=True)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_flag_file_starts_with_its_command_and_the_expected_result(path):
    script = "sweep.py" if path in SWEEPS else "train.py"
    lines = path.read_text().splitlines()
    header = [line for line in lines if line.startswith("#")]
    assert lines[:2] == [f"# python {script} --flagfile=towers/app/experiments/{path.name}", "#"]
    assert lines[: len(header)] == header
    assert "# Expected: " in "\n".join(header)
    assert all(line.startswith("--") for line in lines[len(header) :])
    assert set(re.findall(r"\w+\.flags", "\n".join(lines))) <= {other.name for other in FILES}
    readme = (ROOT / "experiments/README.md").read_text()
    assert f"--flagfile=towers/app/experiments/{path.name}`" in readme


def test_every_flag_file_names_a_known_model_and_data_set(configs):
    assert set(configs) == {path.stem for path in RUNS}
    for config in configs.values():
        assert config.num_gpus is not None and config.run_dir is None
        if config.model.startswith("experiments."):  # see experiments_text_test
            assert (config.model, config.dataset) == (
                "experiments.text:build",
                "experiments.text:load",
            )
        else:
            assert callable(models.load(config.model).build)
            assert config.dataset in datasets.NAMES


def test_the_two_runs_of_the_keras_notebook_differ_only_in_the_number_of_gpus(configs):
    one, eight = (vars(configs[f"mnist_notebook_{name}"]) for name in ("1gpu", "8gpus"))
    assert {name: (one[name], eight[name]) for name in one if one[name] != eight[name]} == {
        "num_gpus": (1, 8)
    }


@pytest.mark.parametrize("name, size", [("wide_mlp", 41_157_402), ("rnn_benchmark", 23_028_352)])
def test_the_full_size_models_have_the_documented_number_of_parameters(name, size, configs):
    source = models.load(configs[name].model)
    assert source.build(source.input_shape, source.num_classes).count_params() == size


def test_the_sweep_covers_five_batches_on_one_and_two_gpus():
    assert parse(PARSE_SWEEPS, SWEEPS) == [[10, ["gru_large"], "music", 15]]


def staleness(*arguments):
    return processes.run("-m", "experiments.staleness", *arguments)


def test_staleness_writes_a_row_for_each_number_of_towers_and_a_picture(tmp_path):
    done = staleness("--towers=1,3", "--updates=30", "--batch_size=16", f"--out_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "not reproducible" in done.stdout
    with (tmp_path / "staleness.csv").open(newline="") as file:
        alone, three = csv.DictReader(file)
    assert (alone["towers"], alone["updates"], float(alone["staleness_mean"])) == ("1", "30", 0.0)
    assert three["towers"] == "3" and 0 < float(three["staleness_mean"]) <= 29
    assert 0.1 < float(alone["accuracy"]) <= 1
    assert (tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")


def test_batch_size_writes_the_steps_and_the_noise_scale_of_each_batch(tmp_path):
    done = processes.run(
        "-m",
        "experiments.batch_size",
        "--batch_sizes=16,256",
        "--accuracy=0.8",
        "--learning_rates=0.25",
        "--seeds=1",
        f"--out_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr
    small, large = csv.DictReader((tmp_path / "batch_size.csv").open())
    assert float(small["steps"]) > float(large["steps"])
    assert float(large["noise_scale"]) > 0
    assert (tmp_path / "batch_size.png").read_bytes().startswith(b"\x89PNG")


def test_staleness_reports_wrong_flags_in_one_line():
    for arguments, error in (
        (["--towers=two", "--out_dir=x"], "--towers (two) must be numbers"),
        ([], "--out_dir"),
    ):
        done = staleness(*arguments)
        last = done.stderr.splitlines()[-1]  # TensorFlow's messages come first
        assert done.returncode == 2 and last.startswith("error: ") and error in last, done.stderr
