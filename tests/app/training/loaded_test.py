"""What a run of train.py goes on from, and what it refuses to go on from."""

import numpy as np
import pytest

from tests.app.run_test import config
from towers.resume import checkpoints, run_dir
from towers.resume.checkpointer import Checkpointer
from towers.resume.train_state import TrainState
from towers.app.training import several_workers
from towers.app.training.build import build
from towers.app.training.loaded import build_metrics, load_newest


@pytest.fixture(name="run", scope="module")
def _run():
    made = build(config())
    return made._replace(config=config(resume="run"))


@pytest.fixture(name="directory")
def _directory(run, tmp_path):
    directory = run_dir.create(str(tmp_path / "run"), "n", run.config.to_json())
    (directory / run_dir.CHECKPOINTS).mkdir()
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


def test_the_newest_checkpoint_is_put_in_place(run, directory):
    kernel = run.step.model.trainable_variables[0]
    save(run, directory, TrainState(step=3, epoch_step=3))
    before = kernel.numpy()
    kernel.assign(before + 1)
    state, checkpointer = loaded(run, directory)
    path, _, damaged = checkpointer.found
    assert (path.name, state.step, damaged) == ("epoch-0-step-3", 3, [])
    np.testing.assert_array_equal(kernel.numpy(), before)


@pytest.mark.parametrize("field, value, words", [
    ("position", {"phase": 1}, "epoch-0-step-1 is no checkpoint of a run: "),
    ("position", 5, "epoch-0-step-1 is no checkpoint of a run: "),
    ("data", None, "epoch-0-step-1 is no checkpoint of a run: "),
    ("config", 5, "epoch-0-step-1 is no checkpoint of a run: "),
    ("config", {"model": "gru"}, r"another run: .*model \(gru then, .* Restore config.json"),
    ("data", {"train": "0", "test": "0"}, "the train data are not those that .* was trained on"),
    ("position", {"results": [[1, 0.5]]}, "a run with other columns than loss"),
])
def test_what_is_no_checkpoint_of_this_run_is_refused(field, value, words, run, directory):
    save(run, directory, TrainState())
    path = directory / run_dir.CHECKPOINTS / "epoch-0-step-0"
    state, arrays = checkpoints.read(path)
    newer = path.with_name("epoch-0-step-1")
    checkpoints.write(newer, checkpoints.Checkpoint({**state, field: value}, arrays))
    with pytest.raises(ValueError, match=words):
        loaded(run, directory)
