"""Data sets by name: the built-in ones, downloaded or from a directory; what fits into memory."""

import gzip
import hashlib
import os
import re
import struct
import tracemalloc
import zlib

import keras
import numpy as np
import pytest

from tests.loading import load, refusal
from towers.app import datasets
from towers.app.datasets import dataset, idx, mnist, music, synthetic
from towers.app.datasets.idx import FILE_NAMES, read_idx


def test_unknown_data_set_lists_the_names_the_nearest_and_the_form():
    message = refusal(load, "fashion-mnist")
    assert "mnist, fashion_mnist, cifar10, music, image_folder, npz, synthetic" in message
    assert "package.module:function" in message and "Did you mean 'fashion_mnist'?" in message


@pytest.mark.parametrize(
    "name, argument, value",
    [
        ("cifar10", "data_dir", "somewhere"),
        ("mnist", "image_size", (8, 6, None)),
    ],
)
def test_an_argument_that_has_no_effect_is_refused(name, argument, value):
    given = {argument: value}
    message = refusal(lambda: datasets.load(name, input_shape=(1,), num_classes=1, **given))
    shown = "8x6" if argument == "image_size" else value
    assert f"{argument} ({shown}) has no effect with dataset={name}" in message


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


@pytest.mark.parametrize(
    "name, shape, labels_shape",
    [("fashion_mnist", (28, 28), (10,)), ("cifar10", (32, 32, 3), (10, 1))],
)
def test_what_keras_downloads_is_float32_in_0_to_1(name, shape, labels_shape, monkeypatch):
    split = np.full((10, *shape), 51, np.uint8), np.arange(10).reshape(labels_shape)
    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", lambda: (split, split))
    dataset = load(name)
    expected = np.full((10, *dataset.input_shape), np.float32(0.2))
    np.testing.assert_array_equal(dataset.train[0], expected)
    assert dataset.num_classes == 10 and dataset.test[1].tolist() == list(range(10))


def test_no_network_or_half_a_download_says_where_to_put_the_files(monkeypatch):
    def fail():
        raise Exception("URL fetch failure")

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", fail)
    message = refusal(load, "cifar10")
    assert "dataset=cifar10" in message and "URL fetch failure" in message
    assert "copy that directory" in message and "~/.keras/datasets" in message


def test_the_embedded_melodies_are_windows_over_notes():
    data = load("music")
    assert (data.name, data.num_classes, data.input_shape) == ("music", 128, (49,))
    for (x, y), count in ((data.train, 18_571), (data.test, 2_803)):
        assert x.shape == (count, 49) and y.shape == (count,)
        assert x.dtype == y.dtype == np.int32
        np.testing.assert_array_equal(x[1, :-1], x[0, 1:])  # consecutive windows
        assert x[1, -1] == y[0]
    assert data.train[0][0, :4].tolist() == [74, 74, 74, 76] and data.train[1][0] == 76


ROW = ", ".join(map(str, range(50)))
MELODY = gzip.compress(ROW.encode(), mtime=0)


@pytest.mark.parametrize(
    "content, message",
    [
        (
            gzip.compress(ROW.replace("49", "128").encode()),
            "note 49 of row 0 is 128, not in 0 to 127",
        ),
        (gzip.compress((ROW + ", 1").encode()), "it has 1 rows of 51 notes, not of 50"),
        (gzip.compress(b"", mtime=0), "it has 0 rows"),
        (gzip.compress(ROW.replace("49", "4.5").encode()), "cannot be read: .*4.5"),
        (None, "cannot be read: No such file or directory"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_a_directory_of_ones_own_and_what_is_no_such_file(content, message, tmp_path):
    for name in music.FILE_NAMES:
        (tmp_path / name).write_bytes(MELODY)
    data = music.load(tmp_path)
    assert data.train[0].tolist() == [list(range(49))] and data.train[1].tolist() == [49]
    (tmp_path / "val.csv.gz").unlink()
    if content is not None:
        (tmp_path / "val.csv.gz").write_bytes(content)
    with pytest.raises(ValueError, match=f"val.csv.gz.*{message}"):
        music.load(tmp_path)


def test_synthetic_takes_shape_and_classes_from_the_caller():
    dataset = load("synthetic")
    (x, y), (x_test, _) = dataset.train, dataset.test
    assert x.shape == (8192, 3, 2) and x_test.shape == (1024, 3, 2)
    assert x.dtype == np.float32 and y.dtype == np.int32
    assert 0 <= x.min() and x.max() < 1 and set(y) == {0, 1, 2, 3}
    for bad in (((0,), 2), ((2,), 0)):
        assert "must be at least 1" in refusal(synthetic.load, *bad)


def test_synthetic_gives_the_same_bits_each_time_and_other_bits_to_test_on():
    first, again = synthetic.load((9,), 3), synthetic.load((9,), 3)
    np.testing.assert_array_equal(first.train[0], again.train[0])
    np.testing.assert_array_equal(first.test[1], again.test[1])
    assert not np.array_equal(first.train[0][:1024], first.test[0])


def test_synthetic_images_of_imagenets_size_take_a_gigabyte_at_most(monkeypatch):
    monkeypatch.setattr(synthetic, "make_split", lambda prototypes, count, generator: count)
    dataset = synthetic.load((224, 224, 3), 2)
    assert dataset.train == 2**30 // (4 * 224 * 224 * 3) == 1783 and dataset.test == 222


def test_a_quarter_of_the_memory_fits_and_one_byte_more_does_not(monkeypatch):
    monkeypatch.setattr(dataset, "usable_memory", lambda: 4000)
    assert dataset.fits(1000) and not dataset.fits(1001)


@pytest.mark.parametrize(
    "groups, file",
    [
        ("0::/mine\n", "mine/memory.max"),
        ("3:cpu:/\n2:memory:/mine\n", "memory/mine/memory.limit_in_bytes"),
    ],
)
def test_the_limit_of_the_processs_control_group_counts(groups, file, monkeypatch, tmp_path):
    machine = dataset.usable_memory()
    (tmp_path / "groups").write_text(groups)
    monkeypatch.setattr(dataset, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(dataset, "MOUNTED", tmp_path)
    assert dataset.usable_memory() == machine > 2**20
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("max\n")
    assert dataset.usable_memory() == machine
    (tmp_path / file).write_text(f"{2**20}\n")
    assert dataset.usable_memory() == 2**20


# IDX files, whole and damaged; the four of a data set in a directory, however they are spelled
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


@pytest.mark.parametrize(
    "content, message",
    [
        (lambda: b"", "unpack"),
        (lambda: bytes.fromhex("89504e47") + bytes(99), "it begins neither with 00 00 08 01"),
        (lambda: WHOLE + b"x", "promises 30 bytes"),
        (lambda: gzip.compress(WHOLE[:-1], mtime=0), "promises 30 bytes"),
        (lambda: gzip.compress(WHOLE, mtime=0)[:-12], "end-of-stream"),
        (lambda: gzip.compress(WHOLE, mtime=0)[:-8] + bytes(8), "CRC check failed"),
        (lambda: gzip.compress(WHOLE, mtime=0) + b"garbage", "Not a gzipped file"),
        (lambda: BIG, "promises 1,683,627,180,032 bytes"),
        (bomb, "promises 10 bytes; fewer or more follow"),
    ],
)
def test_a_damaged_file_is_an_error_with_its_name_in_little_memory(content, message, tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content())
    tracemalloc.start()
    told = refusal(read_idx, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert told.startswith(f"{path} cannot be read as an IDX file") and message in told
    assert peak < 4 * 2**20


@pytest.fixture
def idx_dir(tmp_path):
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


@pytest.mark.parametrize(
    "name, suffix, is_dotted", [("mnist", "", False), ("fashion_mnist", ".gz", True)]
)
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


@pytest.mark.parametrize(
    "replaced, words",
    [
        (
            {"train_images": examples(6)[1], "train_labels": examples(6)[0]},
            ["train-images", "swapped"],
        ),
        (
            {"train_labels": examples(5)[1]},
            ["train-images", "train-labels", "6 examples", "5 labels"],
        ),
        ({"t10k_labels": np.array([9, 10, 0], np.uint8)}, ["t10k-labels", "label 10 of example 1"]),
        ({"t10k_images": examples(3, (4, 6))[0]}, ["(4, 6, 1)", "(4, 5, 1)"]),
    ],
)
def test_files_that_do_not_fit_together_are_an_error_that_names_them(idx_dir, replaced, words):
    message = refusal(load, "mnist", idx_dir(**replaced))
    assert all(word in message for word in words)


def test_a_gzip_that_would_fill_the_memory_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "MAX_GZIP_BYTES", 20)
    (tmp_path / "file").write_bytes(gzip.compress(WHOLE, mtime=0))
    assert "promises 30 bytes; 1 to 20 may be here" in refusal(read_idx, tmp_path / "file")
