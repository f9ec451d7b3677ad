"""A fit's checkpoints, written and found again."""

import keras
import numpy as np
import pytest

from towers.checkpointing import checkpoints
from towers.checkpointing.checkpoints import Checkpoint
from towers.checkpointing.position import Position
from towers.parallel.resumed_state import Saved, Saver


class Counter(keras.callbacks.Callback):
    count = 0

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state


def saver(directory, variables, callbacks=()):
    (directory / "checkpoints").mkdir(exist_ok=True)
    return Saver(directory, {"batch_size": 4}, 17, variables, callbacks)


def test_what_is_saved_is_found_again(tmp_path):
    variable, counter = keras.Variable([1.0, 2.0]), Counter()
    counter.count = 3
    writer = saver(tmp_path, {"model": [variable]}, [counter])
    writer.save(Position(step=5, epoch=1, epoch_step=2, logs={"loss": 0.1}, history={"loss": [2]}))
    assert writer.wait() and writer.newest_step() == 5
    variable.assign([0.0, 0.0])
    counter.count = 0
    saved = Saved(tmp_path)
    saved.check({"batch_size": 4})
    saved.restore({"model": [variable]})
    saved.restore_callbacks([counter])
    assert (saved.is_new, saved.seed, saved.position.step, counter.count) == (False, 17, 5, 3)
    assert saved.position.logs == {"loss": 0.1}
    np.testing.assert_array_equal(variable.numpy(), [1, 2])


def test_without_a_checkpoint_nothing_changes(tmp_path):
    saved, variable = Saved(tmp_path), keras.Variable([1.0])
    saved.check({"batch_size": 4})
    saved.restore({"model": [variable]})
    assert saved.is_new and saved.position == Position()
    assert float(variable.numpy()[0]) == 1


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path):
    writer = saver(tmp_path, {"model": [keras.Variable([1.0])]})
    for step in (1, 2):
        writer.save(Position(step=step))
        assert writer.wait()
    (tmp_path / "checkpoints/epoch-0-step-2/arrays.bin").write_bytes(b"\0\0\0\0")
    with pytest.warns(UserWarning, match="epoch-0-step-2 is damaged: .* SHA-256"):
        assert Saved(tmp_path).position.step == 1


def test_another_fit_is_refused_with_what_differs(tmp_path):
    writer = saver(tmp_path, {})
    writer.save(Position())
    writer.close()
    with pytest.raises(ValueError) as caught:
        Saved(tmp_path).check({"batch_size": 5, "shuffle": True})
    assert "another fit: batch_size (4 then, 5 now), shuffle (None then, True" in str(caught.value)
    assert str(caught.value).endswith("or name another directory.")


@pytest.mark.parametrize("state, words", [
    ({"position": {}, "config": {}}, "holds the checkpoints of a run of train.py"),
    ({"position": {"steps": 3}, "fit": {"seed": 1}}, "is no checkpoint of a fit"),
    ({"position": {}, "fit": {}}, "is no checkpoint of a fit"),
])
def test_a_checkpoint_of_something_else_is_refused(state, words, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    path = checkpoints.path_of(tmp_path / "checkpoints", 0, 0)
    checkpoints.write(path, Checkpoint(state, {}))
    with pytest.raises(ValueError, match=words):
        Saved(tmp_path)
