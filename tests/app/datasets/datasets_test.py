"""Data sets by name: the built-in ones, downloaded or from a directory; what fits into memory."""

import gzip
import hashlib
import re

import keras
import numpy as np
import pytest

from tests.loading import load, refusal
from towers.app import datasets
from towers.app.datasets import cifar10, dataset, mnist, music, synthetic
from towers.app.datasets.idx import FILE_NAMES


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


FILES = (*cifar10.TRAIN_FILES, *cifar10.TEST_FILES)


@pytest.fixture(name="folder")
def _folder(tmp_path):
    """Two images a file; their pixels are 64 * channel + 2 * row + column, plus the file's."""
    channel, row, column = np.indices((3, 32, 32))
    for index, name in enumerate(FILES):
        pixels = (64 * channel + 2 * row + column + index).astype(np.uint8).tobytes()
        content = bytes([index]) + pixels + bytes([9 - index]) + pixels[::-1]
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_images_and_labels_are_read(folder):
    dataset = load("cifar10", str(folder))
    (x, y), (x_test, y_test) = dataset.train, dataset.test
    assert x.shape == (10, 32, 32, 3) and x_test.shape == (2, 32, 32, 3)
    assert y.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5] and y_test.tolist() == [5, 4]
    # row 5, column 7 of the first image of data_batch_3.bin: 10 + 7 + 2, and 64 for each channel
    np.testing.assert_allclose(x[4, 5, 7] * 255, [19, 83, 147], rtol=1e-6)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda path: path.unlink(), "data_batch_2.bin"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "must hold data_batch_1.bin"),
    (lambda path: path.write_bytes(b"\x0a" + path.read_bytes()[1:]), "label 10 of example 2 is"),
])
def test_a_file_that_is_missing_or_damaged_is_an_error(folder, spoil, message):
    spoil(folder / "data_batch_2.bin")
    told = refusal(load, "cifar10", str(folder))
    assert str(folder) in told and message in told


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
WHOLE = gzip.compress(ROW.encode(), mtime=0)


@pytest.mark.parametrize("content, message", [
    (gzip.compress(ROW.replace("49", "128").encode()), "note 49 of row 0 is 128, not in 0 to 127"),
    (gzip.compress(ROW.replace("7,", "-7,", 1).encode()), "note 7 of row 0 is -7, not in 0 to 1"),
    (gzip.compress((ROW + ", 1").encode()), "it has 1 rows of 51 notes, not of 50"),
    (gzip.compress(b"", mtime=0), "it has 0 rows"),
    (gzip.compress(ROW.replace("49", "4.5").encode()), "cannot be read: .*4.5"),
    (gzip.compress(f"{ROW}\n1, 2".encode(), mtime=0), "cannot be read"),
    (WHOLE[:-20], "cannot be read"), (b"no gzip", "cannot be read: .*Not a gzipped file"),
    (None, "cannot be read: .*not found"),
])
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_a_directory_of_ones_own_and_what_is_no_such_file(content, message, tmp_path):
    for name in music.FILE_NAMES:
        (tmp_path / name).write_bytes(WHOLE)
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


def test_synthetic_gives_the_same_bits_for_the_same_seed_only():
    first, again, other = (synthetic.load((9,), 3, 20, 20, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.train[0], again.train[0])
    np.testing.assert_array_equal(first.test[1], again.test[1])
    assert not np.array_equal(first.train[0], other.train[0])
    assert not np.array_equal(first.train[0], first.test[0])


def test_synthetic_images_of_imagenets_size_take_a_gigabyte_at_most(monkeypatch):
    monkeypatch.setattr(synthetic, "make_split", lambda prototypes, count, generator: count)
    dataset = synthetic.load((224, 224, 3), 2)
    assert dataset.train == 2**30 // (4 * 224 * 224 * 3) == 1783 and dataset.test == 222


@pytest.mark.parametrize("bad", [((0,), 2), ((2,), 0), ((2,), 2, 0), ((2,), 2, 1, 1, -1)])
def test_synthetic_refuses_counts_below_1_and_a_negative_seed(bad):
    assert "must be at least 1, and seed" in refusal(synthetic.load, *bad)


def test_a_quarter_of_the_memory_fits_and_one_byte_more_does_not(monkeypatch):
    monkeypatch.setattr(dataset, "usable_memory", lambda: 4000)
    assert dataset.fits(1000) and not dataset.fits(1001)


@pytest.mark.parametrize(("groups", "file"), [
    ("0::/mine\n", "mine/memory.max"),
    ("3:cpu:/\n2:memory:/mine\n", "memory/mine/memory.limit_in_bytes"),
])
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
