"""Fashion-MNIST's download."""

import gzip
import hashlib

import pytest

from tests.loading import load, refusal
from towers.app import datasets
from towers.app.datasets import fashion_mnist
from towers.app.datasets.idx import FILE_NAMES


@pytest.fixture
def server(idx_dir, tmp_path, monkeypatch):
    """A file:// origin of four small files, and an empty cache."""
    idx_dir("{}.gz", gzip.compress)
    md5 = {
        f"{name}.gz": hashlib.md5((tmp_path / f"{name}.gz").read_bytes()).hexdigest()
        for name in FILE_NAMES
    }
    monkeypatch.setattr(fashion_mnist, "ORIGIN", f"{tmp_path.as_uri()}/")
    monkeypatch.setattr(fashion_mnist, "MD5", md5)
    monkeypatch.setattr(fashion_mnist, "CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path


def test_fashion_mnist_is_downloaded_once(server):
    assert datasets.num_examples(load("fashion_mnist").train) == 6
    for name in FILE_NAMES:
        (server / f"{name}.gz").unlink()
    assert datasets.num_examples(load("fashion_mnist").test) == 3


def test_no_network_says_where_to_put_the_files_by_hand(server):
    (server / f"{FILE_NAMES[1]}.gz").unlink()
    message = refusal(load, "fashion_mnist")
    assert "cannot download train-labels-idx1-ubyte.gz" in message and "use data_dir=DIR" in message
    assert "/usr/share/datasets/fashion-mnist" in message


def test_half_a_download_is_not_taken_for_good(server):
    cached = server / "cache" / "datasets" / "fashion-mnist" / f"{FILE_NAMES[0]}.gz"
    cached.parent.mkdir(parents=True)
    cached.write_bytes((server / cached.name).read_bytes()[:20])
    assert datasets.num_examples(load("fashion_mnist").train) == 6


def test_download_with_a_wrong_hash_is_refused_each_time(server, monkeypatch):
    monkeypatch.setitem(fashion_mnist.MD5, f"{FILE_NAMES[2]}.gz", "0" * 32)
    for _ in range(2):
        message = refusal(load, "fashion_mnist")
        assert FILE_NAMES[2] in message and "hash" in message
