"""When a run's state is saved, on a clock and in positions that the test moves."""

import pytest

from tests.results import classifier_result
from towers.checkpointing.position import Position
from towers.training import autosave
from towers.training.autosave import Autosave

RESULT = classifier_result(1, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0)
STEPS_AN_EPOCH = 4


class Saver:
    """Notes the steps that are saved."""

    def __init__(self):
        self.saved = []
        self.is_written = True

    def begin(self, position):
        self.save(position)

    def save(self, position):
        self.saved.append(position.step)

    def wait(self):
        return self.is_written

    def newest_step(self):
        return self.saved[-1] if len(self.saved) > 0 else None


@pytest.fixture(name="told")
def _told():
    return []


def autosaved(told, every=None, **position):
    saver, position = Saver(), Position(**position)
    return saver, position, Autosave(
        saver, position, STEPS_AN_EPOCH, every, lambda *arguments: told.append(arguments)
    )


def test_every_so_many_updates_of_the_run(told):
    saver, position, listener = autosaved(told, every=3)
    for position.step in range(1, 10):
        listener.between_steps()
    assert saver.saved == [3, 6, 9]


def test_at_least_once_in_ten_minutes(told, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(autosave.time, "monotonic", lambda: now[0])
    saver, position, listener = autosaved(told)
    listener.begin()
    for position.step in range(1, 8):
        now[0] += 250
        listener.between_steps()
    assert saver.saved == [0, 3, 6]


def test_each_epoch_and_the_end(told):
    saver, position, listener = autosaved(told)
    position.step = position.epoch_step = 4
    listener.begin_validation()
    assert saver.saved == []
    listener.end_epoch(RESULT, {})
    listener.end()
    assert saver.saved == [4, 4]


def test_the_last_checkpoint_of_a_run_that_ends_in_mid_epoch_comes_before_its_validation(told):
    saver, position, listener = autosaved(told)
    listener.begin()
    position.step, position.epoch_step = 6, 2
    listener.begin_validation()
    listener.end_epoch(RESULT, {})
    listener.end()
    assert saver.saved == [0, 6]
    listener.stop()
    assert (saver.saved, told) == ([0, 6], [(6, True)])


def test_an_early_end_is_saved_and_told(told):
    saver, position, listener = autosaved(told)
    listener.begin()
    position.step, position.epoch_step = 2, 2
    listener.stop()
    assert (saver.saved, told) == ([0, 2], [(2, True)])


def test_half_an_update_is_not_saved(told):
    saver, position, listener = autosaved(told)
    listener.begin()
    position.in_step = True
    listener.stop()
    assert (saver.saved, told) == ([0], [(0, False)])


def test_a_checkpoint_that_could_not_be_written_is_not_called_saved(told):
    saver, position, listener = autosaved(told)
    listener.begin()
    saver.is_written = False
    listener.stop()
    assert told == [(0, False)]


def test_nothing_is_saved_or_told_of_a_run_that_has_not_begun(told):
    saver, _, listener = autosaved(told)
    listener.stop()
    assert (saver.saved, told) == ([], [])
