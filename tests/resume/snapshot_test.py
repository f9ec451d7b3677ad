"""What a checkpoint takes from a run and puts back; where a run stands; its best epoch."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parallel.fits import Remembers
from towers.resume import snapshot
from towers.resume.train_state import TrainState

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


@pytest.fixture
def groups():
    """Variables of a model and of its optimizer."""
    return {
        "model": [keras.Variable([1.0, 2.0], name="kernel"), keras.Variable(3.0, name="bias")],
        "optimizer": [keras.Variable(4, dtype="int64", name="iteration")],
    }


def test_later_steps_do_not_change_what_was_taken(groups):
    arrays = snapshot.copy_arrays(groups)
    before = {name: value.copy() for name, value in arrays.items()}
    for variable in [*groups["model"], *groups["optimizer"]]:
        variable.assign_add(variable)
    for name, value in arrays.items():
        np.testing.assert_array_equal(value, before[name])


def test_another_model_or_optimizer_is_refused_and_nothing_is_assigned(groups):
    model, optimizer = groups.values()
    others = [
        (
            {"model": [model[0], keras.Variable([5.0])], "optimizer": optimizer},
            r"step-7 holds another model: here bias is float32 \[\], in the checkpoint \S+ "
            r"float32 \[1\]\.",
        ),
        (
            {"model": model, "optimizer": []},
            "step-7 holds another optimizer: here 1 variables, in the checkpoint 0",
        ),
    ]
    for other, message in others:
        arrays = {name: value + 1 for name, value in snapshot.copy_arrays(other).items()}
        with pytest.raises(ValueError, match=message):
            snapshot.assign_arrays(groups, arrays, Path("step-7"))
        assert model[0].numpy().tolist() == [1, 2]


def saved(callbacks):
    """As a checkpoint brings it back: the state through JSON, the arrays by their names."""
    state = json.loads(json.dumps(snapshot.callbacks_state(callbacks, pytest.fail)))
    return state, snapshot.callbacks_arrays(callbacks), pytest.fail


def test_callbacks_are_matched_by_their_order_and_new_ones_begin_anew():
    before = [Remembers({"a": [1]}), keras.callbacks.Callback(), Remembers("b")]
    after = [Remembers(), keras.callbacks.Callback(), Remembers(), Remembers("new")]
    states, *rest = saved(before)
    snapshot.restore_callbacks(after, states, *rest)
    assert [c.value for c in after if isinstance(c, Remembers)] == [{"a": [1]}, "b", "new"]
    for state in states:  # older checkpoints do not name the class
        del state["class"]
    snapshot.restore_callbacks(other := [Remembers(), SimpleNamespace(value=1)], states, *rest)
    assert [callback.value for callback in other] == [{"a": [1]}, 1]


def test_a_csv_file_that_is_gone_or_no_text_is_left_out(tmp_path):
    for name, content in [("gone", None), ("odd", b"\xff")]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        logger = keras.callbacks.CSVLogger(tmp_path / name, append=True)
        states, *rest = saved([logger])
        assert states[0]["rows"] is None
        snapshot.restore_callbacks([logger], states, *rest)
        assert not (tmp_path / "gone").exists()


def test_later_epochs_do_not_change_what_was_taken_of_a_callback():
    growing = [Remembers({"seen": [1]}), SimpleNamespace(best=[1], best_weights=[np.zeros(1)])]
    arrays = snapshot.callbacks_arrays(growing)
    state = snapshot.callbacks_state(growing, pytest.fail)
    growing[0].value["seen"].append(2)
    growing[1].best.append(2)
    growing[1].best_weights[0] += 1
    assert [{k: v for k, v in s.items() if k != "class"} for s in state] == [
        {"get_state": {"seen": [1]}},
        {"best": [1]},
    ]
    assert arrays == {"callbacks/1/0": [0]}


def test_what_is_put_back_is_not_changed_by_the_callback_that_has_it():
    """A fit that goes on in mid-epoch puts it back twice."""
    checkpoint, again = saved([Remembers([1])]), Remembers()
    for _ in range(2):
        snapshot.restore_callbacks([again], *checkpoint)
        assert again.value == [1]
        again.value.append(2)


CIRCLE = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    "odd, words",
    [
        (Remembers(CIRCLE), r"Remembers: get_state\(\) returned .*Circular"),
        (
            SimpleNamespace(best=np.zeros(2)),
            "SimpleNamespace: its `best` holds a value that is not",
        ),
    ],
)
def test_a_state_that_is_no_json_is_one_line_then_and_one_when_it_is_missed(odd, words):
    said = []
    state = snapshot.callbacks_state([odd, Remembers(1)], said.append)
    (line,) = said
    assert re.match(f"callback {words}", line) and "Return numbers, text," in line
    json.dumps(state)
    fresh = [type(odd)(), Remembers()]
    snapshot.restore_callbacks(fresh, state, {}, said.append)
    assert said[1:] == [
        f"callback {type(odd).__name__} starts again: its state was not JSON when the checkpoint "
        "was written, so the checkpoint does not hold it."
    ]
    assert fresh[1].value == 1


def test_numpys_numbers_in_a_callback_become_pythons():
    callback = SimpleNamespace(best=np.float32(0.5), wait=np.int64(2))
    (state,) = snapshot.callbacks_state([callback], pytest.fail)
    assert state == {"best": 0.5, "wait": 2, "class": "SimpleNamespace"}
    assert [type(state[name]) for name in ("best", "wait")] == [float, int]


def options(optimizer):
    with snapshot.compared({"optimizer": optimizer}) as found:
        return found


@keras.saving.register_keras_serializable("tests.optimizer_options")
class Untold(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without get_config."""

    def __call__(self, step):
        return 0.1


def a_rate():
    return 0.1


@pytest.mark.parametrize(
    "make, expected",
    [
        (
            lambda: SGD(0.1, momentum=0.9),
            {"learning_rate": 0.1, "momentum": 0.9, "nesterov": False},
        ),
        (
            lambda: SGD(keras.optimizers.schedules.CosineDecay(0.1, 8)),
            {"learning_rate": "CosineDecay", "learning_rate.decay_steps": 8},
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(Adam(0.2)),
            {"inner_optimizer": "Adam", "inner_optimizer.learning_rate": 0.2},
        ),
        (lambda: SGD(a_rate), {"learning_rate": "a_rate", "momentum": 0.0}),
    ],
)
def test_all_that_can_be_told_of_an_optimizer_is_compared(make, expected):
    found = options(make())
    assert found.items() >= {f"optimizer.{name}": value for name, value in expected.items()}.items()
    assert options(make()) == found  # names count the objects of a process


def test_what_cannot_be_told_is_left_out_and_other_values_too():
    assert options(SGD(Untold())) == {}
    assert "optimizer.learning_rate" not in options(SGD(lambda: 0.1))
    with snapshot.compared({"optimizer": "sgd", "second": SGD(0.3), "layers": []}) as found:
        assert {name.split(".")[0] for name in found} == {"second"}


def test_what_callbacks_set_within_is_not_the_scripts_and_what_is_set_between_is():
    optimizer = SGD(0.5)
    with snapshot.compared({"optimizer": optimizer}) as first:
        optimizer.learning_rate = 0.25
    assert options(optimizer) == first
    optimizer.learning_rate = 0.125
    assert options(optimizer) == {**first, "optimizer.learning_rate": 0.125}


def row(epoch, accuracy=0.5):
    return [epoch, 1.0, accuracy, 1.0, accuracy, 1.0, 1.0]


def logs(accuracy=0.5):
    return {"loss": 1.0, "accuracy": accuracy, "val_loss": 1.0, "val_accuracy": accuracy}


def best_of(train_state):
    return train_state.best, train_state.best_step, train_state.epochs_since_best


def two_epochs_and_a_step():
    train_state = TrainState()
    for epoch, accuracy in enumerate([0.75, 0.5], 1):
        for _ in range(4):
            train_state.add_step({"loss": tf.constant(1.0)})
        train_state.end_epoch(row(epoch, accuracy), logs(accuracy), (accuracy, -1.0))
    train_state.add_step({"loss": tf.constant(0.5)})
    return train_state


def test_json_brings_back_what_it_counted():
    train_state = two_epochs_and_a_step()
    assert (train_state.step, train_state.epoch, train_state.epoch_step) == (9, 2, 1)
    assert train_state.history["val_accuracy"] == [0.75, 0.5]
    assert best_of(train_state) == (0.75, 4, 1)
    saved = train_state.to_json()
    train_state.end_epoch(row(3), logs(), None)  # changes nothing of what is saved
    train_state = two_epochs_and_a_step()
    again = TrainState.from_json(json.loads(json.dumps(saved)))
    assert again.logs == {"loss": 0.5}
    train_state.logs = again.logs
    assert again == train_state


def test_a_checkpoint_keeps_its_fields_and_the_newest_may_be_missing_but_none_is_unknown():
    fields = {
        "step": 0,
        "epoch": 0,
        "epoch_step": 0,
        "logs": {},
        "history": {},
        "results": [],
        "best": None,
        "best_step": None,
        "epochs_since_best": 0,
        "stopped": False,
    }
    assert TrainState().to_json() == {**fields, "best_saved": None, "best_loss": None}
    assert TrainState.from_json(fields) == TrainState()
    with pytest.raises(TypeError, match="phase"):
        TrainState.from_json({**fields, "phase": 1})


def test_a_run_is_stopped_by_a_callback_or_for_lack_of_a_better_epoch():
    train_state = two_epochs_and_a_step()
    assert [train_state.is_stopped(patience) for patience in (None, 1, 2)] == [False, True, False]
    train_state.epochs_since_best = 2
    assert train_state.is_stopped(1) and train_state.is_stopped(2)
    train_state.stopped = True
    assert train_state.is_stopped(None)


@pytest.mark.parametrize(
    "callback, state, loss, expected",
    [
        (keras.callbacks.TerminateOnNaN(), {}, math.nan, True),
        (keras.callbacks.TerminateOnNaN(), {}, 0.5, False),
        (keras.callbacks.TerminateOnNaN(), {}, None, False),
        (keras.callbacks.EarlyStopping(patience=3), {"wait": 3, "stopped_epoch": 5}, 0.5, True),
        (keras.callbacks.EarlyStopping(patience=4), {"wait": 3, "stopped_epoch": 5}, 0.5, False),
        (keras.callbacks.EarlyStopping(patience=0), {"wait": 0, "stopped_epoch": 0}, 0.5, False),
    ],
)
def test_a_run_is_complete_if_its_callbacks_would_stop_it_again_at_once(
    callback, state, loss, expected
):
    states = [{**state, "class": type(callback).__name__}]
    assert snapshot.stops_again([callback], states, loss) is expected
    assert not snapshot.stops_again([], states, loss)  # a later script lacks the callback
