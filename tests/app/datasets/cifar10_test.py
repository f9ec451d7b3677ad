"""CIFAR-10's binary version, whole and damaged; its Python version is never unpickled."""

import hashlib
import io
import pickle
import tarfile

import numpy as np
import pytest

from towers.app import datasets
from towers.app.datasets import cifar10

FILES = (*cifar10.TRAIN_FILES, *cifar10.TEST_FILES)


def load(path=None):
    data_dir = None if path is None else str(path)
    return datasets.load("cifar10", data_dir, input_shape=(1,), num_classes=2)


def refusal(path=None):
    with pytest.raises(ValueError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def two_images_a_file(monkeypatch):
    monkeypatch.setattr(cifar10, "IMAGES_A_FILE", 2)


def content(index):
    """Two images; the pixel at row r, column c of channel k is 64 * k + 2 * r + c, plus index."""
    channel, row, column = np.indices((3, 32, 32))
    pixels = (64 * channel + 2 * row + column + index).astype(np.uint8).tobytes()
    return bytes([index]) + pixels + bytes([9 - index]) + pixels[::-1]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / cifar10.FOLDER
    path.mkdir()
    for index, name in enumerate(FILES):
        (path / name).write_bytes(content(index))
    return path


@pytest.fixture
def archive(folder, tmp_path):
    path = tmp_path / "away" / cifar10.ARCHIVE
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, cifar10.FOLDER)
    return path


def check(dataset):
    (x, y), (x_test, y_test) = dataset.train, dataset.test
    assert x.shape == (10, 32, 32, 3) and x_test.shape == (2, 32, 32, 3)
    assert x.dtype == np.float32 and y.dtype == np.int32 and x.flags.c_contiguous
    assert y.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5] and y_test.tolist() == [5, 4]
    # row 5, column 7 of the first image of data_batch_3.bin: 10 + 7 + 2, and 64 for each channel
    np.testing.assert_allclose(x[4, 5, 7] * 255, [19, 83, 147], rtol=1e-6)
    assert (dataset.input_shape, dataset.num_classes) == ((32, 32, 3), 10)


def test_images_and_labels_are_read_from_the_folder_and_from_its_parent(folder):
    check(load(folder))
    check(load(folder.parent))


def test_the_archive_is_read_by_its_path_and_from_its_directory(archive):
    check(load(archive))
    check(load(archive.parent))
    assert [path.name for path in archive.parent.iterdir()] == [cifar10.ARCHIVE]


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b""])
def test_a_file_of_another_size_is_refused_naming_it(folder, change):
    path = folder / "data_batch_2.bin"
    path.write_bytes(change(path.read_bytes()))
    message = refusal(folder)
    assert str(path) in message and "2 images of 3,073 take 6,146" in message


def test_a_label_out_of_range_is_refused_naming_file_and_image(folder):
    path = folder / "test_batch.bin"
    damaged = bytearray(path.read_bytes())
    damaged[3073] = 10
    path.write_bytes(damaged)
    assert f"{path}: label 10 of image 1 is out of range, 0 to 9" in refusal(folder)


def test_a_missing_file_is_refused_naming_it(folder):
    (folder / "data_batch_4.bin").unlink()
    assert "data_batch_4.bin cannot be read: No such file" in refusal(folder)


def test_a_truncated_or_altered_archive_is_refused(archive):
    whole = archive.read_bytes()
    for damaged in (whole[:-30], whole[: len(whole) // 2], b"", b"hello", whole[:-8] + b"\0" * 8):
        archive.write_bytes(damaged)
        assert f"{archive} is damaged" in refusal(archive)


def test_an_archive_that_lacks_files_or_holds_a_directory_of_their_name_is_refused(tmp_path):
    path = tmp_path / "other.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        directory = tarfile.TarInfo("data_batch_1.bin")
        directory.type = tarfile.DIRTYPE
        tar.addfile(directory)
        member = tarfile.TarInfo("data_batch_2.bin")
        member.size = 6146
        tar.addfile(member, io.BytesIO(content(1)))
    assert "lacks data_batch_1.bin, data_batch_3.bin" in refusal(path)


def test_an_archive_may_not_promise_larger_files(tmp_path):
    path = tmp_path / "large.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("data_batch_1.bin")
        member.size = 2**22
        tar.addfile(member, io.BytesIO(bytes(2**22)))
    assert "4,194,304 bytes" in refusal(path)


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["cifar-10-batches-py/data_batch_1", "data_batch_1",
                                  "cifar-10-python.tar.gz"])
def test_the_python_version_is_refused_and_its_payload_never_runs(tmp_path, name):
    trace = tmp_path / "payload_ran"
    path = tmp_path / "data" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(pickle.dumps(Payload(str(trace))))
    message = refusal(tmp_path / "data")
    assert "pickled" in message and "cifar-10-binary.tar.gz" in message
    assert not trace.exists()


def test_a_directory_without_the_files_is_refused_saying_what_to_put_there(tmp_path):
    assert "holds neither cifar-10-binary.tar.gz nor data_batch_1.bin" in refusal(tmp_path)
    assert "does not exist; put https://" in refusal(tmp_path / "nothing")


@pytest.fixture
def server(archive, tmp_path, monkeypatch):
    """A file:// origin of a small archive, and an empty cache."""
    monkeypatch.setattr(cifar10, "ORIGIN", f"{archive.parent.as_uri()}/")
    monkeypatch.setattr(cifar10, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(cifar10, "CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return archive


def test_it_is_downloaded_once(server):
    check(load())
    server.unlink()
    check(load())


def test_no_network_says_where_to_put_the_file_by_hand(server):
    server.unlink()
    message = refusal()
    assert "cannot download" in message and "use data_dir=DIR" in message


def test_a_download_with_a_wrong_hash_is_refused(server, monkeypatch):
    monkeypatch.setattr(cifar10, "MD5", "0" * 32)
    assert "hash" in refusal()
