"""Where a run stands, in memory and as JSON."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.results import classifier_result
from towers.resume.train_state import Best, Monitor, TrainState, plain


def result(epoch, accuracy=0.5):
    return classifier_result(epoch, 1.0, accuracy, 1.0, accuracy, 1.0, 1.0)


def logs(accuracy=0.5):
    return {"loss": 1.0, "accuracy": accuracy, "val_loss": 1.0, "val_accuracy": accuracy}


def two_epochs_and_a_step():
    train_state = TrainState()
    for epoch, accuracy in enumerate([0.75, 0.5], 1):
        for _ in range(4):
            train_state.add_step({"loss": tf.constant(1.0)})
        train_state.end_epoch(result(epoch, accuracy), logs(accuracy), Monitor())
    train_state.add_step({"loss": tf.constant(0.5)})
    return train_state


def test_it_counts_steps_and_epochs():
    train_state = two_epochs_and_a_step()
    assert (train_state.step, train_state.epoch, train_state.epoch_step) == (9, 2, 1)
    assert train_state.history["val_accuracy"] == [0.75, 0.5]
    assert [row[0] for row in train_state.results] == [1, 2]
    assert train_state.best == Best(0.75, 4, 1)


def test_json_brings_it_back():
    train_state = two_epochs_and_a_step()
    saved = train_state.to_json()
    train_state.end_epoch(result(3), logs(), Monitor())  # changes nothing of what is saved
    train_state = two_epochs_and_a_step()
    again = TrainState.from_json(json.loads(json.dumps(saved)))
    assert again.logs == {"loss": 0.5}
    train_state.logs = again.logs
    assert again == train_state


def test_a_checkpoint_keeps_its_fields_and_one_without_the_newest_is_read():
    fields = {
        "step": 0, "epoch": 0, "epoch_step": 0, "logs": {}, "history": {}, "results": [],
        "best": None, "best_step": None, "epochs_since_best": 0, "stopped": False,
    }
    assert TrainState().to_json() == {**fields, "best_saved": None}
    assert TrainState.from_json(fields) == TrainState()


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="phase"):
        TrainState.from_json({**TrainState().to_json(), "phase": 1})


def test_a_run_is_stopped_by_a_callback_or_for_lack_of_a_better_epoch():
    train_state = two_epochs_and_a_step()
    assert [train_state.is_stopped(patience) for patience in (None, 1, 2)] == [False, True, False]
    train_state.stopped = True
    assert train_state.is_stopped(None)


@pytest.mark.parametrize("make", [lambda: 2, lambda: np.float32(2), lambda: np.array(2),
                                  lambda: tf.constant(2.0)])
def test_numbers_become_pythons(make):
    value = make()
    assert plain(value) == 2 and type(plain(value)) in (int, float)
