"""examples/trackers/: what TensorBoard and Optuna hold is what was trained."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from tests import forked

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.stem for path in (ROOT / "examples/trackers").glob("with_*.py"))


def run(script, cwd):
    """What a Python script of one expression prints, as JSON."""
    done = forked.run("-c", f"import json, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
                            f"from examples.trackers import {script}", cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def scalars(directory, tag):
    """[(step, value), ...] of one scalar in an event file."""
    events = EventAccumulator(str(directory)).Reload()
    return [(event.step, tensor_util.make_ndarray(event.tensor_proto).item())
            for event in events.Tensors(tag)]


def results(directory, column):
    with open(directory / "results.csv", encoding="utf-8") as file:
        return [float(row[column]) for row in csv.DictReader(file)]


@pytest.mark.matrix
def test_tensorboard_shows_each_epoch_of_a_fit_and_of_a_run(tmp_path):
    history = run("with_tensorboard as t\nprint(json.dumps(t.main(2, 600)))", tmp_path)
    logs = tmp_path / "logs"
    for split, name in (("train", "loss"), ("validation", "val_accuracy")):
        shown = scalars(logs / "train" / split, f"epoch_{name.removeprefix('val_')}")
        assert [step for step, _ in shown] == [0, 1]
        np.testing.assert_allclose([value for _, value in shown], history[name], rtol=1e-6)
        np.testing.assert_allclose(results(logs / "run", name), history[name], rtol=1e-5)
    losses = [value for _, value in scalars(logs / "fit" / "train", "epoch_loss")]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert list((logs / "run" / "tensorboard").iterdir())  # the run's own


def test_optuna_ends_hopeless_runs_early_and_knows_the_best(tmp_path):
    trials = run(
        "with_optuna as o\nprint(json.dumps([(t.state.name, t.value, list("
        "t.intermediate_values.values())) for t in o.main(3, 2, 600).trials]))", tmp_path)
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_the_command_that_it_and_the_page_document(name):
    text = (ROOT / "examples/trackers" / f"{name}.py").read_text(encoding="utf-8")
    command = f"python -m examples.trackers.{name}\n"
    assert command in text and text.endswith('\n\nif __name__ == "__main__":\n    main()\n')
    assert f"`examples/trackers/{name}.py`" in (ROOT / "docs/trackers.md").read_text("utf-8")
