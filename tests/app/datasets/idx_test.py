"""IDX files, whole and damaged; the four of a data set in a directory, however they are spelled."""

import gzip
import os
import struct
import tempfile
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loading import load, refusal
from towers.app.datasets import idx
from towers.app.datasets.idx import FILE_NAMES, read_idx


def examples(count=6, shape=(4, 5)):
    x = np.random.default_rng(count).integers(0, 256, (count, *shape)).astype(np.uint8)
    return x, (np.arange(count) % 10).astype(np.uint8)


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


IMAGES = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5)
WHOLE = idx_bytes(IMAGES)


BIG = struct.pack(">IIII", 0x803, 2**31, 28, 28) + bytes(784)


def bomb():
    """100 MB of zeros behind a header that promises 10 bytes."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [compressor.compress(struct.pack(">II", 0x801, 10))]
    parts += [compressor.compress(bytes(2**20)) for _ in range(100)]
    return b"".join(parts) + compressor.flush()


@pytest.mark.parametrize(("content", "message"), [
    (lambda: b"", "unpack"),
    (lambda: bytes.fromhex("89504e47") + bytes(99), "it begins neither with 00 00 08 01"),
    (lambda: WHOLE[:2] + b"\x0d" + WHOLE[3:], "it begins neither"),  # float32
    (lambda: WHOLE[:9], "unpack"),
    (lambda: WHOLE[:-1], "promises 30 bytes"),
    (lambda: WHOLE + b"x", "promises 30 bytes"),
    (lambda: gzip.compress(WHOLE[:-1], mtime=0), "promises 30 bytes"),
    (lambda: gzip.compress(WHOLE, mtime=0)[:-12], "end-of-stream"),
    (lambda: gzip.compress(WHOLE, mtime=0)[:-8] + bytes(8), "CRC check failed"),
    (lambda: gzip.compress(WHOLE, mtime=0) + b"garbage", "Not a gzipped file"),
    (lambda: idx_bytes(IMAGES[:0]), "promises 0 bytes"),
    (lambda: BIG, "promises 1,683,627,180,032 bytes"),
    (lambda: gzip.compress(BIG, mtime=0), "promises 1,683,627,180,032 bytes"),
    (bomb, "promises 10 bytes; fewer or more follow"),
])
def test_a_damaged_file_is_an_error_with_its_name_in_little_memory(content, message, tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content())
    tracemalloc.start()
    told = refusal(read_idx, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert told.startswith(f"{path} cannot be read as an IDX file") and message in told
    assert peak < 4 * 2**20


HEADERS = st.builds(
    lambda code, sizes: struct.pack(f">BBBB{len(sizes)}I", 0, 0, code, len(sizes), *sizes),
    st.sampled_from([0x08, 0x08, 0x08, 0x0D]),
    st.lists(st.integers(0, 5) | st.integers(0, 2**32 - 1), max_size=5),
)
CONTENTS = st.builds(lambda header, body: header + body, HEADERS | st.binary(), st.binary())


@settings(max_examples=100, deadline=None)
@given(content=CONTENTS, gzipped=st.booleans(), cut=st.integers(0, 60), flip=st.integers(-1, 60))
def test_any_bytes_give_an_array_or_one_error_line_in_bounded_memory(content, gzipped, cut, flip):
    if gzipped:
        content = gzip.compress(content, mtime=0)
    content = bytearray(content[: max(len(content) - cut, 0)] if cut % 2 else content)
    if 0 <= flip < len(content):
        content[flip] ^= 0x10
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "labels")
        with open(path, "wb") as file:
            file.write(content)
        tracemalloc.start()
        try:
            array = read_idx(path)
            assert array.dtype == np.uint8 and array.size > 0
            if not content.startswith(b"\x1f\x8b"):
                assert content.endswith(array.tobytes())
        except ValueError as error:
            assert path in str(error) and "\n" not in str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 4 * 2**20  # it is read 1 MiB at a time


@pytest.fixture(name="idx_dir")
def _idx_dir(tmp_path):
    """Writes the four files; keyword arguments such as train_images replace their arrays."""

    def write(suffix="", is_dotted=False, **replaced):
        arrays = (*examples(6), *examples(3))
        for name, array in zip(FILE_NAMES, arrays, strict=True):
            array = replaced.get("_".join(name.split("-")[:2]), array)
            if array is not None:
                compress = gzip.compress if suffix else bytes
                name = name.replace("-idx", ".idx") if is_dotted else name
                (tmp_path / f"{name}{suffix}").write_bytes(compress(idx_bytes(array)))
        return str(tmp_path)

    return write


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize(("suffix", "is_dotted"), [("", False), (".gz", False), (".gz", True)])
def test_four_files_are_read_from_data_dir(idx_dir, name, suffix, is_dotted, tmp_path):
    if is_dotted:
        (tmp_path / "train-images-idx3-ubyte").mkdir()  # as in Kaggle's archive
    dataset = load(name, idx_dir(suffix, is_dotted))
    x, y = examples(6)
    np.testing.assert_array_equal(dataset.train[0][..., 0], x.astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(dataset.train[1], y)
    assert len(dataset.test[1]) == 3
    assert (dataset.name, dataset.input_shape, dataset.notes) == (name, (4, 5, 1), ())


def test_a_pipe_or_a_missing_directory_is_an_error(idx_dir, tmp_path):
    folder = idx_dir(t10k_labels=None)
    os.mkfifo(tmp_path / "t10k-labels-idx1-ubyte")  # opening it would wait for a writer
    for data_dir in (folder, str(tmp_path / "nothing")):
        message = refusal(load, "mnist", data_dir)
        assert message.startswith(f"data_dir ({data_dir}) lacks t") and "is a file there" in message


@pytest.mark.parametrize(("replaced", "words"), [
    ({"t10k_labels": None}, ["data_dir (", "lacks t10k-labels", "t10k-labels.idx1-ubyte.gz"]),
    ({"train_images": examples(6)[1], "train_labels": examples(6)[0]}, ["train-images", "swapped"]),
    ({"t10k_labels": examples(3)[0]}, ["t10k-labels", "labels are 1-dimensional"]),
    ({"train_labels": examples(5)[1]}, ["train-images", "train-labels", "6 examples", "5 labels"]),
    ({"t10k_labels": np.array([9, 10, 0], np.uint8)}, ["t10k-labels", "label 10 of example 1"]),
    ({"t10k_images": examples(3, (4, 6))[0]}, ["(4, 6, 1)", "(4, 5, 1)"]),
])
def test_files_that_do_not_fit_together_are_an_error_that_names_them(idx_dir, replaced, words):
    message = refusal(load, "mnist", idx_dir(**replaced))
    assert all(word in message for word in words)


def test_a_gzip_that_would_fill_the_memory_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "MAX_GZIP_BYTES", 20)
    (tmp_path / "file").write_bytes(gzip.compress(WHOLE, mtime=0))
    assert "promises 30 bytes; 1 to 20 may be here" in refusal(read_idx, tmp_path / "file")
