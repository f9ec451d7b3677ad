"""Where a run stands, in memory and as JSON."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.results import classifier_result
from towers.checkpointing.best import Best, Monitor
from towers.checkpointing.position import Position, plain


def result(epoch, accuracy=0.5):
    return classifier_result(epoch, 1.0, accuracy, 1.0, accuracy, 1.0, 1.0)


def logs(accuracy=0.5):
    return {"loss": 1.0, "accuracy": accuracy, "val_loss": 1.0, "val_accuracy": accuracy}


def two_epochs_and_a_step():
    position = Position()
    for epoch, accuracy in enumerate([0.75, 0.5], 1):
        for _ in range(4):
            position.add_step({"loss": tf.constant(1.0)})
        position.end_epoch(result(epoch, accuracy), logs(accuracy), Monitor())
    position.add_step({"loss": tf.constant(0.5)})
    return position


def test_it_counts_steps_and_epochs():
    position = two_epochs_and_a_step()
    assert (position.step, position.epoch, position.epoch_step) == (9, 2, 1)
    assert position.history["val_accuracy"] == [0.75, 0.5]
    assert [row[0] for row in position.results] == [1, 2]
    assert position.best == Best(0.75, 4, 1)


def test_json_brings_it_back():
    position = two_epochs_and_a_step()
    again = Position.from_json(json.loads(json.dumps(position.to_json())))
    assert again.logs == {"loss": 0.5}
    position.logs = again.logs
    assert again == position


def test_a_checkpoint_has_the_fields_that_it_always_had():
    assert Position().to_json() == {
        "step": 0, "epoch": 0, "epoch_step": 0, "logs": {}, "history": {}, "results": [],
        "best": None, "best_step": None, "epochs_since_best": 0, "stopped": False,
    }


def test_what_is_saved_does_not_change_with_later_steps():
    position = two_epochs_and_a_step()
    saved = position.to_json()
    before = json.dumps(saved)
    position.end_epoch(result(3), logs(), Monitor())
    assert json.dumps(saved) == before


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="phase"):
        Position.from_json({**Position().to_json(), "phase": 1})


def test_an_epoch_is_the_best_only_as_it_ends():
    position = Position()
    seen = []
    for epoch, accuracy in enumerate([0.5, 0.75, 0.75], 1):
        position.add_step({})
        position.end_epoch(result(epoch, accuracy), logs(accuracy), Monitor())
        seen.append(position.is_best)
    assert seen == [True, True, False]


def test_a_run_is_stopped_by_a_callback_or_for_lack_of_a_better_epoch():
    position = two_epochs_and_a_step()
    assert [position.is_stopped(patience) for patience in (None, 1, 2)] == [False, True, False]
    position.stopped = True
    assert position.is_stopped(None)


def test_an_update_that_has_ended_is_not_under_way():
    position = Position(in_step=True)
    position.add_step({})
    assert not position.in_step


@pytest.mark.parametrize("make", [lambda: 2, lambda: np.float32(2), lambda: np.array(2),
                                  lambda: tf.constant(2.0)])
def test_numbers_become_pythons(make):
    value = make()
    assert plain(value) == 2 and type(plain(value)) in (int, float)
