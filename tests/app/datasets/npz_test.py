"""NumPy archives, whole, damaged and hostile."""

import os

import numpy as np
import pytest

from tests.loading import load, refusal
from towers.app.datasets import npz


@pytest.fixture(name="archive")
def _archive(tmp_path):
    """Writes FILE.npz; keyword arguments replace its arrays."""

    def write(**replaced):
        x = np.random.default_rng(6).integers(0, 256, (6, 4, 5)).astype(np.uint8)
        arrays = {"x_train": x, "y_train": np.arange(6), "x_test": x[:3], "y_test": np.arange(3)}
        path = tmp_path / "data.npz"
        arrays |= replaced
        np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
        return str(path)

    return write


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("key", npz.KEYS)
def test_object_array_is_refused_and_its_payload_never_runs(archive, tmp_path, key):
    trace = tmp_path / "payload_ran"
    path = archive(**{key: np.array([Payload(str(trace))] * 3, object)})
    message = refusal(load, "npz", path)
    assert path in message and "Python objects are never loaded" in message
    assert not trace.exists()
    with np.load(path, allow_pickle=True) as trusted:  # the payload is a live one
        trusted[key]
    assert trace.exists()


def test_an_error_names_the_file_and_what_is_wrong(archive, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_bytes(b"x_train,y_train\n")
    np.save(tmp_path / "one.npy", np.zeros(3))
    x = np.zeros((3, 4, 5))
    x[1, 0, 0] = np.nan
    assert "y_train is not a file in the archive" in refusal(load, "npz", archive(y_train=None))
    for path, message in (
        (archive(x_test=x), "(x_test, y_test): example 1 holds nan"),
        (str(tmp_path / "nothing.npz"), "it does not exist"),
        (str(tmp_path), "it is no file"), (str(tmp_path / "pipe"), "it is no file"),
        (str(tmp_path / "text"), "never loaded"), (str(tmp_path / "one.npy"), "not an .npz arch"),
    ):
        told = refusal(load, "npz", path)
        assert told.startswith(path) and message in told
    assert "dataset=npz needs data_dir=FILE.npz" in refusal(load, "npz")


def test_a_damaged_archive_is_an_error_with_its_name(archive):
    path = archive()
    with open(path, "rb") as file:
        content = file.read()
    dataset = load("npz", path)
    assert (dataset.input_shape, dataset.num_classes, dataset.name) == ((4, 5), 6, "npz")
    for index in range(0, len(content), 37):
        damaged = bytearray(content)
        damaged[index] ^= 0xFF
        for spoilt in (content[:index], bytes(damaged)):
            with open(path, "wb") as file:
                file.write(spoilt)
            try:
                load("npz", path)
            except ValueError as error:
                assert path in str(error) and "\n" not in str(error)
