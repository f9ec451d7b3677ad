"""IDX files, whole and damaged."""

import gzip
import os
import re
import struct
import tempfile
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towers.app.datasets import idx
from towers.app.datasets.idx import read_idx


def idx_bytes(array, code=0x08):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.tobytes()


IMAGES = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5)


def refusal(path):
    """The one line that read_idx refuses `path` with; it names the file."""
    with pytest.raises(ValueError) as caught:
        read_idx(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "train-images-idx3-ubyte"
        path.write_bytes(content)
        return path

    return write


def test_values_and_shape_come_back(written):
    array = read_idx(written(idx_bytes(IMAGES)))
    np.testing.assert_array_equal(array, IMAGES)
    assert array.dtype == np.uint8


def test_gzip_is_told_by_its_first_bytes_not_by_its_name(written):
    np.testing.assert_array_equal(read_idx(written(gzip.compress(idx_bytes(IMAGES)))), IMAGES)


def test_missing_path_is_refused(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nothing.gz")


def test_directory_is_refused(tmp_path):
    assert "is a directory" in refusal(tmp_path)


def test_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")


def test_forbidden_file_is_refused(written, monkeypatch):
    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    path = written(idx_bytes(IMAGES))
    monkeypatch.setattr("builtins.open", forbidden)
    assert "cannot be read: Permission denied" in refusal(path)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="a file whose reading fails")
def test_failing_read_is_refused():
    assert "cannot be read" in refusal("/proc/self/mem")


def test_empty_file_is_refused(written):
    assert "has only 0 bytes" in refusal(written(b""))


@pytest.mark.parametrize(
    "magic", ["89504e47", "00000c00", "00000800", "00000805", "01000803", "00000703"]
)
def test_wrong_magic_is_refused(written, magic):
    message = refusal(written(bytes.fromhex(magic) + bytes(99)))
    assert "is not an IDX file" in message and bytes.fromhex(magic).hex(" ") in message


def test_values_other_than_bytes_are_refused_by_their_type(written):
    assert "float32" in refusal(written(idx_bytes(IMAGES.astype(">f4"), code=0x0D)))


def test_truncated_gzip_is_refused_naming_the_file(written):
    content = gzip.compress(idx_bytes(IMAGES))
    for end in range(2, len(content)):
        assert "truncated gzip" in refusal(written(content[:end]))


def test_corrupt_gzip_is_refused_naming_the_file(written):
    whole = gzip.compress(idx_bytes(IMAGES))
    messages = []
    for index in range(10, len(whole)):  # gzip's own header, 10 bytes, has idle ones
        content = bytearray(whole)
        content[index] ^= 0xFF
        messages.append(refusal(written(bytes(content))))
    assert "corrupt gzip file (CRC check failed" in messages[-8]  # the checksum
    assert any("while decompressing" in message for message in messages)  # zlib's own errors


def test_garbage_behind_the_gzip_is_refused(written):
    assert "corrupt gzip" in refusal(written(gzip.compress(idx_bytes(IMAGES)) + b"garbage"))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_truncated_idx_is_refused_naming_the_file(written, compress):
    message = refusal(written(compress(idx_bytes(IMAGES)[:-1])))
    assert "promises 2 x 3 x 5 = 30 bytes" in message


def test_truncated_header_is_refused(written):
    assert "ends within its header" in refusal(written(idx_bytes(IMAGES)[:9]))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_bytes_beyond_the_header_count_are_refused(written, compress):
    assert "but more follow" in refusal(written(compress(idx_bytes(IMAGES) + b"x")))


def test_no_examples_are_refused(written):
    assert "no examples" in refusal(written(idx_bytes(IMAGES[:0])))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_header_of_2_to_the_31_images_is_refused_before_allocating(written, compress):
    path = written(compress(struct.pack(">IIII", 0x803, 2**31, 28, 28) + bytes(784)))
    tracemalloc.start()
    assert f"{2**31 * 784:,} bytes" in refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_header_that_deflate_could_not_keep_is_refused_before_reading(written):
    path = written(gzip.compress(struct.pack(">II", 0x801, 10**6) + bytes(10)))
    assert re.search(r"which \d+ gzipped bytes cannot hold", refusal(path))


def bomb(num_megabytes, promised):
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [compressor.compress(struct.pack(">II", 0x801, promised))]
    parts += [compressor.compress(bytes(2**20)) for _ in range(num_megabytes)]
    return b"".join(parts) + compressor.flush()


def test_gzip_bomb_behind_a_small_header_takes_little_memory(written):
    path = written(bomb(100, promised=10))
    tracemalloc.start()
    assert "but more follow" in refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20


def test_gzip_bomb_behind_a_fitting_header_is_refused_above_the_limit(written, monkeypatch):
    monkeypatch.setattr(idx, "MAX_GZIP_BYTES", 2**20)
    assert "unpack it first" in refusal(written(bomb(2, promised=2 * 2**20)))


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
        content = gzip.compress(content)
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
        assert peak < 2**20
