"""MNIST, embedded."""

import gzip
import hashlib
import re

from tests.loading import load
from towers.app import datasets
from towers.app.datasets import mnist
from towers.app.datasets.idx import FILE_NAMES


def test_mnist_is_embedded_with_its_real_examples():
    real_mnist = load("mnist")
    (x_train, y_train), (x_test, y_test) = real_mnist.train, real_mnist.test
    assert x_train.shape == (60_000, 28, 28, 1) and x_test.shape == (10_000, 28, 28, 1)
    assert y_train[:5].tolist() == [5, 0, 4, 1, 9] and y_test[:5].tolist() == [7, 2, 1, 0, 4]
    assert datasets.num_examples(real_mnist.train) == 60_000
    assert datasets.num_examples(real_mnist.test) == 10_000
    assert (real_mnist.input_shape, real_mnist.num_classes) == ((28, 28, 1), 10)


def test_embedded_files_have_the_hashes_of_their_readme():
    readme = (mnist.EMBEDDED_DIR / "README.md").read_text()
    table = re.findall(r"\| (\S+ubyte) \| (\w{32}) \|", readme)
    assert sorted(name for name, _ in table) == sorted(FILE_NAMES)
    for name, md5 in table:
        content = gzip.decompress((mnist.EMBEDDED_DIR / f"{name}.gz").read_bytes())
        assert hashlib.md5(content).hexdigest() == md5
