"""Data sets by name."""

import pytest

from tests.loading import load, refusal
from towers.app import datasets


def test_unknown_data_set_lists_the_names_the_nearest_and_the_form():
    message = refusal(load, "fashion-mnist")
    names = (
        "mnist, fashion_mnist, cifar10, music, image_folder, npz, synthetic, array_record, "
        "tfrecord"
    )
    assert names in message
    assert "package.module:function" in message and "Did you mean 'fashion_mnist'?" in message


def test_features_where_there_are_no_records_are_refused():
    with pytest.raises(ValueError, match=r"features \(a:b\) parses records, and dataset=mnist has"):
        datasets.load("mnist", input_shape=(), num_classes=1, features="a:b")


@pytest.mark.parametrize("name", ["synthetic", "json:loads"])
def test_data_dir_where_nothing_is_read_from_it_is_refused(name):
    assert "data_dir (somewhere) has no effect" in refusal(load, name, "somewhere")
