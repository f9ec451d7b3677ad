"""Data sets of the user's own: `package.module:function`."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.loading import load, refusal
from towers.app import datasets


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    header = "import numpy as np, tensorflow as tf\n"
    yield lambda text: (tmp_path / "user_data.py").write_text(header + text)
    sys.modules.pop("user_data", None)


SLICES = "tf.data.Dataset.from_tensor_slices((np.zeros((5, 2)), np.arange(5) % 3))"


def test_user_arrays_are_read(user_module):
    code = "def load(): return (np.zeros((5, 2)), np.arange(5)), [np.ones((2, 2)), [0, 1]]"
    user_module(f"NUM_CLASSES = 8\n{code}")
    dataset = load("user_data:load")
    assert (dataset.name, dataset.input_shape, dataset.num_classes) == ("user_data:load", (2,), 8)
    assert dataset.test[0].dtype == np.float32 and datasets.num_examples(dataset.train) == 5


def test_user_tf_data_is_read_and_counted(user_module):
    user_module(f"def load(): return {SLICES}, {SLICES}.filter(lambda x, y: y < 2)")
    dataset = load("user_data:load")
    assert (dataset.input_shape, dataset.num_classes) == ((2,), 3)
    assert datasets.num_examples(dataset.train) == 5
    assert datasets.num_examples(dataset.test) == 4  # a filter does not know its count
    assert isinstance(dataset.train, tf.data.Dataset)


@pytest.mark.parametrize(
    "expression, words",
    [
        ("None", "returned a NoneType"),
        ("(1, 2)", "is (int, int)"),
        (f"({SLICES}.batch(2),) * 2", "add .unbatch()"),
        (f"({SLICES}.repeat(),) * 2", "repeats forever"),
        (f"({SLICES}.take(0),) * 2", "no examples"),
        (f"({SLICES}.map(lambda x, y: x),) * 2", "must be (x, y)"),
        (f"({SLICES}.map(lambda x, y: (x, tf.cast(y, tf.float32))),) * 2", "y is float32"),
        (f"({SLICES}.map(lambda x, y: (x, y - 1)),) * 2", "label -1"),
        (f"({SLICES}.map(lambda x, y: (x[:y], y)),) * 2", "unknown shape"),
        (f"({SLICES}, {SLICES}.map(lambda x, y: (x[:1], y)))", "examples have shapes (1,)"),
    ],
)
def test_user_function_that_returns_something_else_is_refused(user_module, expression, words):
    user_module(f"def load(): return {expression}")
    message = refusal(load, "user_data:load")
    assert words in message and "user_data:load" in message


def test_error_of_the_user_function_passes_through(user_module):
    user_module("def load(): raise KeyError('mine')")
    with pytest.raises(KeyError, match="mine"):
        load("user_data:load")
