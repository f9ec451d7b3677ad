"""When a run's state is saved, and what a run writes as it begins."""

import json

import pytest

from tests.app.loop_test import config
from tests.results import classifier_result
from towers.resume import run_dir
from towers.resume.checkpointer import Checkpointer
from towers.resume.train_state import TrainState
from towers.app.training.autosave import Autosave
from towers.app.training.build import build

pytestmark = pytest.mark.light  # not about updates or curves

RESULT = classifier_result(1, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0)
STEPS_AN_EPOCH = 4


class Notes(Checkpointer):
    """Notes the steps that are saved, and writes nothing."""

    def __init__(self, run, directory, **options):
        super().__init__(directory, run.workers, pytest.fail, **options)
        self.saved = []
        self.is_written = True

    def save(self, train_state, is_last=False):
        self.saved.append(train_state.step)

    def wait(self):
        return self.is_written

    def newest_step(self):
        return self.saved[-1] if len(self.saved) > 0 else None


@pytest.fixture(name="run", scope="module")
def _run():
    return build(config())._replace(steps_an_epoch=STEPS_AN_EPOCH)


@pytest.fixture(name="autosaved")
def _autosaved(run, tmp_path, told):
    def make(every=None, changed=None, **state):
        saver, state = Notes(run, tmp_path, every=every), TrainState(**state)
        return saver, state, Autosave(
            run._replace(**changed or {}), tmp_path, saver, state,
            lambda *arguments: told.append(arguments),
        )

    return make


@pytest.fixture(name="told")
def _told():
    return []


def test_every_so_many_updates_of_the_run(autosaved, told):
    saver, train_state, listener = autosaved(every=3)
    for train_state.step in range(1, 10):
        listener.between_steps()
    assert saver.saved == [3, 6, 9]


def test_each_epoch_and_the_end(autosaved, told):
    saver, train_state, listener = autosaved()
    train_state.step = train_state.epoch_step = 4
    listener.begin_validation()
    assert saver.saved == []
    listener.end_epoch(RESULT, {})
    listener.end()
    assert saver.saved == [4, 4]


def test_a_run_that_ends_in_mid_epoch_is_saved_for_the_last_time_before_its_validation(
    autosaved, told
):
    saver, train_state, listener = autosaved()
    listener.begin()
    train_state.step, train_state.epoch_step = 6, 2
    listener.begin_validation()
    listener.end_epoch(RESULT, {})
    listener.end()
    assert saver.saved == [0, 6]
    listener.stop()
    assert (saver.saved, told) == ([0, 6], [(6, True)])


def test_an_early_end_is_saved_and_told(autosaved, told):
    saver, train_state, listener = autosaved()
    listener.begin()
    train_state.step, train_state.epoch_step = 2, 2
    listener.stop()
    assert (saver.saved, told) == ([0, 2], [(2, True)])


def test_half_an_update_is_not_saved(autosaved, told):
    saver, train_state, listener = autosaved()
    listener.begin()
    train_state.in_step = True
    listener.stop()
    assert (saver.saved, told) == ([0], [(0, False)])


def test_a_checkpoint_that_could_not_be_written_is_not_called_saved(autosaved, told):
    saver, train_state, listener = autosaved()
    listener.begin()
    saver.is_written = False
    listener.stop()
    assert told == [(0, False)]


def test_nothing_is_saved_or_told_of_a_run_that_has_not_begun(autosaved, told):
    saver, _, listener = autosaved()
    listener.stop()
    assert (saver.saved, told) == ([], [])


def test_config_json_gets_a_larger_limit_and_what_a_killed_process_left_goes(autosaved, tmp_path):
    (tmp_path / ".best.5.tmp.keras").write_text("half")
    _, _, listener = autosaved(changed={"config": config(epochs=5, resume="run")})
    listener.begin()
    saved = json.loads((tmp_path / run_dir.CONFIG).read_text())
    assert (saved["epochs"], saved["resume"]) == (5, None)
    assert not (tmp_path / ".best.5.tmp.keras").exists()


@pytest.mark.parametrize("resume, is_left", [(None, False), ("run", True)])
def test_a_run_without_a_first_checkpoint_leaves_no_directory_that_it_has_made(
    resume, is_left, run, tmp_path
):
    """There is no checkpoints/ to write into."""
    directory = tmp_path / "run"
    directory.mkdir()
    run = run._replace(config=config(resume=resume))
    checkpointer = Checkpointer(directory, run.workers, pytest.fail)
    listener = Autosave(run, directory, checkpointer, TrainState(), lambda *arguments: None)
    with pytest.raises(ValueError, match=r"run_dir .* no checkpoint can be written: .*No such fil"):
        listener.begin()
    assert directory.exists() == is_left
