"""Every packaged flagfile is a run that train.py or sweep.py takes; experiments/staleness.py."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests import forked
from towers import TrainConfig
from towers.app import datasets, models

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "towers" / "app" / "experiments").glob("*.flags"))
SWEEPS = [path for path in FILES if path.stem.endswith("_sweep")]
RUNS = [path for path in FILES if path not in SWEEPS]

# Flags are global to a process: these are read in one of their own, one file after the other.
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
        given.model, given.dropout, given.batch_sizes, given.gpu_counts, TrainConfig()
    )
    print(json.dumps([len(cells), given.model, given.dataset, given.epochs]))
"""


def parse(code, paths):
    """The JSON line that the code prints for each of the files."""
    done = forked.run("-c", code, *paths, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def configs():
    """{file's name: TrainConfig}."""
    values = parse(PARSE_RUNS, RUNS)
    return {p.stem: TrainConfig(**value) for p, value in zip(RUNS, values, strict=True)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_flagfile_begins_with_its_command_and_says_what_to_expect(path):
    script = "sweep.py" if path in SWEEPS else "train.py"
    lines = path.read_text().splitlines()
    header = [line for line in lines if line.startswith("#")]
    assert lines[:2] == [f"# python {script} --flagfile=towers/app/experiments/{path.name}", "#"]
    assert lines[: len(header)] == header
    assert "# Expected: " in "\n".join(header)
    assert all(line.startswith("--") for line in lines[len(header):])
    assert set(re.findall(r"\w+\.flags", "\n".join(lines))) <= {other.name for other in FILES}
    readme = (ROOT / "experiments" / "README.md").read_text()
    assert f"--flagfile=towers/app/experiments/{path.name}`" in readme


def test_every_run_is_a_valid_configuration_of_a_known_model_and_data_set(configs):
    assert set(configs) == {path.stem for path in RUNS}
    for config in configs.values():
        assert config.num_gpus is not None and config.run_dir is None
        if config.model.startswith("experiments."):  # see experiments_text_test
            assert (config.model, config.dataset) == (
                "experiments.text:build", "experiments.text:load"
            )
        else:
            assert callable(models.load(config.model).build)
            assert config.dataset in datasets.NAMES


def test_the_notebooks_two_runs_differ_in_the_gpus_alone(configs):
    one, eight = (vars(configs[f"mnist_notebook_{name}"]) for name in ("1gpu", "8gpus"))
    assert {name: (one[name], eight[name]) for name in one if one[name] != eight[name]} == {
        "num_gpus": (1, 8)
    }


@pytest.mark.parametrize(
    ("name", "size"), [("wide_mlp", 41_157_402), ("rnn_benchmark", 23_028_352)]
)
def test_the_full_size_models_have_the_parameters_they_are_known_for(name, size, configs):
    source = models.load(configs[name].model)
    assert source.build(source.input_shape, source.num_classes).count_params() == size


def test_the_sweep_spans_five_batches_on_one_and_two_gpus():
    assert parse(PARSE_SWEEPS, SWEEPS) == [[10, ["gru_large"], "music", 15]]


def staleness(*arguments):
    return forked.run("-m", "experiments.staleness", *arguments, cwd=ROOT)


def test_staleness_of_each_number_of_towers_is_a_row_and_a_picture(tmp_path):
    done = staleness("--towers=1,3", "--updates=30", "--batch_size=16", f"--out_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "not reproducible" in done.stdout
    with (tmp_path / "staleness.csv").open(newline="") as file:
        alone, three = csv.DictReader(file)
    assert (alone["towers"], alone["updates"], float(alone["staleness_mean"])) == ("1", "30", 0.0)
    assert three["towers"] == "3" and 0 < float(three["staleness_mean"]) <= 29
    assert 0.1 < float(alone["accuracy"]) <= 1
    assert (tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")


def test_staleness_ends_in_one_line_for_bad_input():
    for arguments, error in (
        (["--towers=two", "--out_dir=x"], "--towers (two) must be numbers"), ([], "--out_dir"),
    ):
        done = staleness(*arguments)
        last = done.stderr.splitlines()[-1]  # TensorFlow's own come first
        assert done.returncode == 2 and last.startswith("error: ") and error in last, done.stderr
