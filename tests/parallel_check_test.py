"""What make_parallel warns of; what it refuses is in parallel_model_test."""

import warnings

import pytest

import towers
from tests.parallel import classifier
from towers import parallel_check
from towers.step import state


def test_variables_on_a_gpu_are_hinted_at_once(monkeypatch):
    monkeypatch.setattr(state, "variables_device", lambda model: "/gpu:0")
    parallel_check.hint_gpu_variables.cache_clear()
    with pytest.warns(UserWarning, match="tf.device..*/cpu:0") as caught:
        for _ in range(3):
            towers.make_parallel(classifier(), 1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    monkeypatch.undo()
    parallel_check.hint_gpu_variables.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        towers.make_parallel(classifier(), 1)
