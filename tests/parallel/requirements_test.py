"""What make_parallel warns of; what it refuses is in parallel_model_test."""

import warnings

import keras
import pytest

import towers
from tests.parallel.pairs import classifier, rows
from towers.parallel import requirements
from towers.step import state


def test_variables_on_a_gpu_are_hinted_at_once(monkeypatch):
    monkeypatch.setattr(state, "variables_device", lambda model: "/gpu:0")
    requirements.hint_gpu_variables.cache_clear()
    with pytest.warns(UserWarning, match="tf.device..*/cpu:0") as caught:
        for _ in range(3):
            towers.make_parallel(classifier(), 1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    monkeypatch.undo()
    requirements.hint_gpu_variables.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        towers.make_parallel(classifier(), 1)


class PrintsItsLoss(keras.Sequential):
    """As one debugs a step that runs eagerly."""

    def train_step(self, data):
        logs = super().train_step(data)
        print("loss: %.4f" % logs["loss"])
        return logs


def test_a_step_that_needs_values_is_refused_with_its_line_where_run_eagerly_was_asked_for():
    parallel = towers.make_parallel(PrintsItsLoss(classifier().layers), 2)
    with pytest.warns(UserWarning, match="run_eagerly"):
        parallel.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    with pytest.raises(ValueError, match="^requirements_test.py:.*tf.print") as refused:
        parallel.fit(*rows(), verbose=0)
    assert len(str(refused.value).splitlines()) == 1
