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


@pytest.mark.parametrize(("name", "argument", "value"), [
    ("synthetic", "data_dir", "somewhere"), ("json:loads", "data_dir", "somewhere"),
    ("mnist", "features", "a:b"), ("mnist", "image_size", (8, 6, None)),
])
def test_an_argument_that_has_no_effect_is_refused(name, argument, value):
    given = {argument: value}
    message = refusal(lambda: datasets.load(name, input_shape=(1,), num_classes=1, **given))
    shown = "8x6" if argument == "image_size" else value
    assert f"{argument} ({shown}) has no effect with dataset={name}" in message
