"""What a checkpoint takes from a run, and that putting it back gives the same run.

And what a script has told an optimizer, and what callbacks have made of it since.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from towers.resume import snapshot
from towers.step import TowerStep

L = keras.layers
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
PATH = Path("step-7")


def arrays_of(step):
    return snapshot.copy_arrays(snapshot.variables_of(step))


def make_step(units=4, optimizer="adam", seed=0):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([
        keras.Input((3,)), L.Dense(units), L.BatchNormalization(), L.Dropout(0.5), L.Dense(1)
    ])
    return TowerStep(model, optimizer, "mse", metrics=["mae"], devices=["/cpu:0"], num_towers=2)


def batch(seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(6, 3)).astype("float32"), rng.normal(size=(6, 1)).astype("float32")


def trained_step(**options):
    step = make_step(**options)
    step.train_batch(*batch(0))
    return step


def test_later_steps_do_not_change_what_was_taken():
    step = trained_step()
    arrays = arrays_of(step)
    before = {name: value.copy() for name, value in arrays.items()}
    step.train_batch(*batch(1))
    for name, value in arrays.items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("others, message", [
    ({"units": 5}, r"step-7 holds another model: here \S*kernel is float32 \[3, 4\], in the "
                   r"checkpoint \S*kernel float32 \[3, 5\]\."),
    ({"optimizer": "sgd"}, "step-7 holds another optimizer: here 14 variables, in the checkpoint "
                           "2"),
])
def test_another_model_or_optimizer_is_refused_and_nothing_is_assigned(others, message):
    step, arrays = trained_step(), arrays_of(trained_step(seed=1, **others))
    before = arrays_of(step)
    with pytest.raises(ValueError, match=message):
        snapshot.assign_arrays(snapshot.variables_of(step), arrays, PATH)
    for name, value in arrays_of(step).items():
        np.testing.assert_array_equal(value, before[name])


def saved(callbacks):
    """As a checkpoint brings it back: the state through JSON, the arrays by their names."""
    state = json.loads(json.dumps(snapshot.callbacks_state(callbacks, pytest.fail)))
    return state, snapshot.callbacks_arrays(callbacks), pytest.fail


class Remembers(keras.callbacks.Callback):
    def __init__(self, value=None):
        super().__init__()
        self.value = value

    def get_state(self):
        return self.value

    def set_state(self, value):
        self.value = value


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
        {"get_state": {"seen": [1]}}, {"best": [1]}
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


@pytest.mark.parametrize("odd, words", [
    (Remembers({1: object()}), r"Remembers: get_state\(\) returned .*type object is not JSON"),
    (Remembers(CIRCLE), r"Remembers: get_state\(\) returned .*Circular"),
    (SimpleNamespace(best=np.zeros(2)), "SimpleNamespace: its `best` holds a value that is not"),
])
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


@pytest.mark.parametrize("make, expected", [
    (lambda: SGD(0.1, momentum=0.9), {"learning_rate": 0.1, "momentum": 0.9, "nesterov": False}),
    (lambda: SGD(keras.optimizers.schedules.CosineDecay(0.1, 8)),
     {"learning_rate": "CosineDecay", "learning_rate.decay_steps": 8}),
    (lambda: keras.optimizers.LossScaleOptimizer(Adam(0.2)),
     {"inner_optimizer": "Adam", "inner_optimizer.learning_rate": 0.2}),
    (lambda: SGD(a_rate), {"learning_rate": "a_rate"}),
    (lambda: SGD(lambda: 0.1), {"momentum": 0.0}),
])
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
