"""A run's state goes to the disk and comes back, or says why it cannot."""

import json

import keras
import numpy as np
import pytest

from tests.loop_test import config
from towers.checkpointing import checkpoints, run_dir
from towers.checkpointing.position import Position
from towers.training.build import build
from towers.training.saver import Saver


class Counts(keras.callbacks.Callback):
    """Remembers a number."""

    count = 0

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state


@pytest.fixture(name="run", scope="module")
def _run():
    return build(config())


@pytest.fixture(name="directory")
def _directory(run, tmp_path):
    directory = run_dir.create(str(tmp_path / "run"), "n", run.config.to_json())
    (directory / run_dir.CHECKPOINTS).mkdir()
    return directory


def saver_of(run, directory, *callbacks, warn=pytest.fail):
    return Saver(run, directory, callbacks, warn)


def kernel(run):
    return run.step.model.trainable_variables[0]


def test_what_is_saved_comes_back(run, directory):
    saver = saver_of(run, directory, counts := Counts())
    assert saver.load() is None and saver.newest_step() is None
    position = Position()
    saver.begin(position)
    assert saver.newest_step() == 0
    counts.count = 7
    position.step = position.epoch_step = 3
    saver.save(position)
    assert saver.wait() and saver.newest_step() == 3
    before = kernel(run).numpy()
    kernel(run).assign(before + 1)
    saver = saver_of(run, directory, counts := Counts())
    path, loaded, damaged = saver.load()
    assert (path.name, loaded, damaged) == ("epoch-0-step-3", position, [])
    np.testing.assert_array_equal(kernel(run).numpy(), before)
    assert counts.count == 0
    kernel(run).assign(before + 1)  # as a callback might, when it hears of the run's begin
    saver.begin(loaded)
    np.testing.assert_array_equal(kernel(run).numpy(), before)
    assert counts.count == 7


def test_config_json_gets_a_larger_limit_and_what_a_killed_process_left_goes(run, directory):
    (directory / ".best.5.tmp.keras").write_text("half")
    larger = run._replace(config=config(epochs=5, resume="run"))
    saver_of(larger, directory).begin(Position())
    saved = json.loads((directory / run_dir.CONFIG).read_text())
    assert (saved["epochs"], saved["resume"]) == (5, None)
    assert not (directory / ".best.5.tmp.keras").exists()


def test_a_run_without_a_first_checkpoint_does_not_begin(run, directory):
    (directory / run_dir.CHECKPOINTS).rmdir()
    warnings = []
    with pytest.raises(ValueError, match=r"no checkpoint can be written: .* \(No such file or dir"):
        saver_of(run, directory, warn=warnings.append).begin(Position())
    assert warnings == []


def test_results_without_a_checkpoint_are_not_replaced(run, directory):
    (directory / run_dir.RESULTS).write_text("epoch\n1\n")
    with pytest.raises(ValueError, match="holds no checkpoint, and .* holds results"):
        saver_of(run, directory).load()


@pytest.mark.parametrize(
    ("field", "value"), [("position", {"phase": 1}), ("position", 5), ("data", None), ("config", 5)]
)
def test_what_is_no_checkpoint_of_a_run_is_refused(field, value, run, directory):
    saver = saver_of(run, directory)
    saver.begin(Position())
    path = directory / run_dir.CHECKPOINTS / "epoch-0-step-0"
    state, arrays = checkpoints.read(path)
    newer = path.with_name("epoch-0-step-1")
    checkpoints.write(newer, checkpoints.Checkpoint({**state, field: value}, arrays))
    with pytest.raises(ValueError, match="epoch-0-step-1 is no checkpoint of a run: "):
        saver.load()


def test_a_run_is_finished_with_its_final_model_only(run, directory):
    saver = saver_of(run, directory)
    assert saver.finished_step() is None
    saver.finish(Position(step=8))
    assert saver.finished_step() is None
    (directory / run_dir.FINAL).touch()
    assert saver.finished_step() == 8
    (directory / run_dir.CHECKPOINTS / "complete").write_text("eight")
    assert saver.finished_step() is None


def test_a_finish_that_cannot_be_noted_is_a_warning(run, directory):
    (directory / run_dir.CHECKPOINTS).rmdir()
    warnings = []
    saver_of(run, directory, warn=warnings.append).finish(Position())
    assert warnings == [
        f"{directory}/checkpoints cannot be written (No such file or directory)."
    ]
