"""What the tests of the data sets share."""

import pytest

from towers.app import datasets


def load(name, data_dir=None):
    """A data set by name; "synthetic" has this shape and so many classes."""
    return datasets.load(name, data_dir, input_shape=(3, 2), num_classes=4)


def refusal(function, *args):
    """The one line of the ValueError that a call raises."""
    with pytest.raises(ValueError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)
