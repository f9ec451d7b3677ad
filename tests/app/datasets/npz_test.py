"""NumPy archives, whole, damaged and hostile."""

import numpy as np
import pytest

from tests.loading import load, refusal
from towers.app import datasets
from towers.app.datasets import npz


def examples(count=6, shape=(4, 5)):
    rng = np.random.default_rng(count)
    return rng.integers(0, 256, (count, *shape)).astype(np.uint8), np.arange(count) % 10


@pytest.fixture
def archive(tmp_path):
    """Writes FILE.npz; keyword arguments replace its arrays."""

    def write(**replaced):
        x, y = examples(6)
        arrays = {"x_train": x, "y_train": y, "x_test": x[:3], "y_test": y[:3]} | replaced
        path = tmp_path / "data.npz"
        np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
        return str(path)

    return write


def test_npz_is_read(archive):
    dataset = load("npz", archive())
    wanted = examples(6)[0].astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(dataset.train[0], wanted)
    assert (dataset.input_shape, dataset.num_classes) == ((4, 5), 6)
    assert datasets.num_examples(dataset.test) == 3


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
    assert path in message and f"{key} is an array of Python objects" in message
    assert not trace.exists()
    with np.load(path, allow_pickle=True) as trusted:  # the payload is a live one
        trusted[key]
    assert trace.exists()


def test_missing_keys_are_listed(archive):
    message = refusal(load, "npz", archive(y_train=None, y_test=None))
    assert "lacks y_train, y_test" in message and "it has x_train, x_test" in message


def test_npz_nan_is_refused_naming_file_and_key(archive):
    x = np.zeros((3, 4, 5))
    x[1, 0, 0] = np.nan
    path = archive(x_test=x)
    assert refusal(load, "npz", path).startswith(f"{path} (x_test, y_test): example 1 holds nan")


def test_npz_without_data_dir_is_refused():
    assert "dataset=npz needs data_dir=FILE.npz" in refusal(load, "npz")


def test_npz_missing_or_a_directory_is_refused(tmp_path):
    assert "does not exist" in refusal(load, "npz", str(tmp_path / "nothing.npz"))
    assert "is not a file" in refusal(load, "npz", str(tmp_path))


def test_file_that_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "data.npz"
    for content in (b"", b"PK", b"\x80\x04N.", b"x_train,y_train\n"):
        path.write_bytes(content)
        assert f"{path} is not an .npz archive" in refusal(load, "npz", str(path))


def test_damaged_npz_is_refused_naming_the_file(archive):
    path = archive()
    with open(path, "rb") as file:
        content = file.read()
    for end in range(4, len(content), 37):
        with open(path, "wb") as file:
            file.write(content[:end])
        assert path in refusal(load, "npz", path)
    for index in range(0, len(content), 37):
        damaged = bytearray(content)
        damaged[index] ^= 0xFF
        with open(path, "wb") as file:
            file.write(damaged)
        try:
            load("npz", path)
        except ValueError as error:
            assert path in str(error) and "\n" not in str(error)
