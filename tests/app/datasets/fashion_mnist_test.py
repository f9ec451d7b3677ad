"""Fashion-MNIST and CIFAR-10 as Keras downloads them."""

import keras
import numpy as np
import pytest

from tests.loading import load, refusal


@pytest.mark.parametrize(("name", "shape"), [("fashion_mnist", (28, 28)), ("cifar10", (32, 32, 3))])
def test_what_keras_downloads_is_float32_in_0_to_1(name, shape, monkeypatch):
    x, y = np.full((10, *shape), 51, np.uint8), np.arange(10, dtype=np.uint8)
    if name == "cifar10":
        y = y[:, np.newaxis]
    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", lambda: ((x, y), (x, y)))
    dataset = load(name)
    assert (dataset.num_classes, dataset.input_shape) == (10, (*shape, 1)[:3])
    np.testing.assert_array_equal(dataset.train[0], np.full((10, *shape, 1)[:4], np.float32(0.2)))
    assert dataset.test[1].tolist() == list(range(10))


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10"])
def test_no_network_or_half_a_download_says_where_to_put_the_files(name, monkeypatch):
    def fail():
        raise Exception("URL fetch failure")

    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", fail)
    message = refusal(load, name)
    assert f"dataset={name}" in message and "URL fetch failure" in message
    assert "use data_dir=DIR" in message and "~/.keras/datasets" in message
