"""The data sets, whole and damaged."""

import gzip
import hashlib
import re
import struct

import numpy as np
import pytest

from tests.loading import load, refusal
from towers import datasets
from towers.datasets import fashion_mnist, mnist, synthetic
from towers.datasets.arrays import from_arrays
from towers.datasets.idx_directory import FILE_NAMES

WHERE = ("train.bin", "test.bin")


def examples(count=6, shape=(4, 5), num_classes=10):
    rng = np.random.default_rng(count)
    x = rng.integers(0, 256, (count, *shape)).astype(np.uint8)
    return x, (np.arange(count) % num_classes).astype(np.uint8)


# MNIST


@pytest.fixture(scope="module")
def real_mnist():
    return load("mnist")


def test_mnist_is_embedded_with_its_real_examples(real_mnist):
    (x_train, y_train), (x_test, y_test) = real_mnist.train, real_mnist.test
    assert x_train.shape == (60_000, 28, 28, 1) and x_test.shape == (10_000, 28, 28, 1)
    assert y_train[:5].tolist() == [5, 0, 4, 1, 9] and y_test[:5].tolist() == [7, 2, 1, 0, 4]
    assert datasets.num_examples(real_mnist.train) == 60_000
    assert datasets.num_examples(real_mnist.test) == 10_000
    assert (real_mnist.input_shape, real_mnist.num_classes) == ((28, 28, 1), 10)


def test_mnist_is_float32_in_0_to_1_and_int32(real_mnist):
    x, y = real_mnist.train
    assert x.dtype == np.float32 and y.dtype == np.int32
    assert x.min() == 0 and x.max() == 1
    assert x.mean(dtype=np.float64) == pytest.approx(0.1307, abs=5e-5)  # the well-known mean


def test_embedded_files_have_the_hashes_of_their_readme():
    readme = (mnist.EMBEDDED_DIR / "README.md").read_text()
    table = re.findall(r"\| (\S+ubyte) \| (\w{32}) \|", readme)
    assert sorted(name for name, _ in table) == sorted(FILE_NAMES)
    for name, md5 in table:
        content = gzip.decompress((mnist.EMBEDDED_DIR / f"{name}.gz").read_bytes())
        assert hashlib.md5(content).hexdigest() == md5


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def idx_dir(tmp_path):
    """Writes the four files; keyword arguments such as train_images replace their arrays."""

    def write(spelling="{}", compress=bytes, **replaced):
        (x_train, y_train), (x_test, y_test) = examples(6), examples(3)
        arrays = (x_train, y_train, x_test, y_test)
        for name, array in zip(FILE_NAMES, arrays, strict=True):
            array = replaced.get("_".join(name.split("-")[:2]), array)
            if array is not None:
                file_name = spelling.format(name)
                if spelling.startswith("."):
                    file_name = file_name[1:].replace("-idx", ".idx")
                (tmp_path / file_name).write_bytes(compress(idx_bytes(array)))
        return str(tmp_path)

    return write


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize(
    "spelling, compress",
    [("{}", bytes), ("{}.gz", gzip.compress), (".{}", bytes), (".{}.gz", gzip.compress)],
)
def test_four_idx_files_are_read_from_data_dir(idx_dir, name, spelling, compress):
    dataset = load(name, idx_dir(spelling, compress))
    x, y = examples(6)
    np.testing.assert_array_equal(dataset.train[0][..., 0], x.astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(dataset.train[1], y)
    assert datasets.num_examples(dataset.test) == 3
    assert (dataset.name, dataset.input_shape) == (name, (4, 5, 1))


def test_directory_of_a_file_name_is_passed_over_for_the_file(idx_dir, tmp_path):
    (tmp_path / FILE_NAMES[0]).mkdir()  # as in Kaggle's archive
    assert datasets.num_examples(load("mnist", idx_dir(".{}")).test) == 3


def test_missing_idx_file_is_refused_naming_what_was_looked_for(idx_dir):
    message = refusal(load, "mnist", idx_dir(t10k_labels=None))
    assert "--data_dir" in message and "t10k-labels-idx1-ubyte.gz" in message
    assert "t10k-labels.idx1-ubyte" in message and "train" not in message.split("lacks")[1]


def test_missing_data_dir_is_refused(tmp_path):
    assert "does not exist" in refusal(load, "mnist", str(tmp_path / "nothing"))


def test_file_as_data_dir_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert "is not a directory" in refusal(load, "mnist", str(tmp_path / "file"))


def test_swapped_images_and_labels_are_refused_saying_so(idx_dir):
    x, y = examples(6)
    message = refusal(load, "mnist", idx_dir(train_images=y, train_labels=x))
    assert "swapped" in message
    assert "train-images-idx3-ubyte holds labels" in message


def test_labels_in_the_place_of_images_are_refused(idx_dir):
    message = refusal(load, "mnist", idx_dir(train_images=examples(6)[1]))
    assert "train-images" in message and "images are 3-dimensional" in message


def test_images_in_the_place_of_labels_are_refused(idx_dir):
    message = refusal(load, "mnist", idx_dir(t10k_labels=examples(3)[0]))
    assert "t10k-labels" in message and "labels are 1-dimensional" in message


def test_images_and_labels_of_different_counts_are_refused_naming_both(idx_dir):
    message = refusal(load, "mnist", idx_dir(train_labels=examples(5)[1]))
    assert "train-images-idx3-ubyte" in message and "train-labels-idx1-ubyte" in message
    assert "6 examples" in message and "5 labels" in message


def test_idx_label_out_of_range_is_refused_naming_the_file(idx_dir):
    message = refusal(load, "mnist", idx_dir(t10k_labels=np.array([9, 10, 0], np.uint8)))
    assert "t10k-labels" in message and "label 10 of example 1" in message and "0 to 9" in message


def test_train_and_test_images_of_different_sizes_are_refused(idx_dir):
    message = refusal(load, "mnist", idx_dir(t10k_images=examples(3, (4, 6))[0]))
    assert "(4, 6, 1)" in message and "(4, 5, 1)" in message


# Fashion-MNIST's download


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
    assert "cannot download train-labels-idx1-ubyte.gz" in message and "--data_dir" in message
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


# Synthetic


def test_synthetic_takes_shape_and_classes_from_the_caller():
    dataset = load("synthetic")
    (x, y), (x_test, _) = dataset.train, dataset.test
    assert x.shape == (8192, 3, 2) and x_test.shape == (1024, 3, 2)
    assert x.dtype == np.float32 and y.dtype == np.int32
    assert 0 <= x.min() and x.max() < 1 and set(y) == {0, 1, 2, 3}
    assert (dataset.input_shape, dataset.num_classes) == ((3, 2), 4)


def test_synthetic_gives_the_same_bits_for_the_same_seed_only():
    first, again, other = (synthetic.load((9,), 3, 20, 20, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.train[0], again.train[0])
    np.testing.assert_array_equal(first.test[1], again.test[1])
    assert not np.array_equal(first.train[0], other.train[0])
    assert not np.array_equal(first.train[0], first.test[0])


def test_synthetic_labels_can_be_learned_from_train_for_test():
    (x, y), (x_test, y_test) = (lambda d: (d.train, d.test))(synthetic.load((28, 28), 10, 500, 200))
    means = np.stack([x[y == label].mean(axis=0) for label in range(10)])
    distances = ((x_test[:, None] - means) ** 2).sum(axis=(2, 3))
    assert (distances.argmin(axis=1) == y_test).mean() > 0.95


def test_synthetic_images_of_imagenets_size_take_a_gigabyte_at_most(monkeypatch):
    monkeypatch.setattr(synthetic, "_split", lambda prototypes, count, generator: count)
    dataset = synthetic.load((224, 224, 3), 2)
    assert dataset.train == 2**30 // (4 * 224 * 224 * 3) == 1783 and dataset.test == 222


@pytest.mark.parametrize("bad", [((0,), 2), ((2,), 0), ((2,), 2, 0), ((2,), 2, 1, 0)])
def test_synthetic_refuses_counts_below_1(bad):
    assert "must be at least 1" in refusal(synthetic.load, *bad)


def test_synthetic_refuses_a_negative_seed():
    assert "seed (-1)" in refusal(synthetic.load, (2,), 2, 1, 1, -1)


# Arrays


def test_uint8_is_scaled_and_other_numbers_keep_their_values():
    y = np.array([0, 1])
    for dtype, wanted in ((np.uint8, 1.0), (np.int64, 255.0), (np.float64, 255.0)):
        x = np.array([[0], [255]], dtype)
        dataset = from_arrays("a", (x, y), (x, y), WHERE)
        assert dataset.train[0].dtype == np.float32
        assert dataset.train[0].tolist() == [[0], [wanted]]


def test_labels_of_shape_n_by_1_are_taken_and_counted_over_both_splits():
    x = np.zeros((2, 3), np.float32)
    dataset = from_arrays("a", (x, [[0], [1]]), (x, [[0], [6]]), WHERE)
    assert dataset.num_classes == 7 and dataset.test[1].tolist() == [0, 6]
    assert dataset.train[1].dtype == np.int32


GOOD = (np.zeros((3, 2), np.float32), np.array([0, 1, 1]))


@pytest.mark.parametrize(
    "x, y, words",
    [
        (GOOD[0], GOOD[1][:2], "3 examples, but 2 labels"),
        (GOOD[0][:0], GOOD[1][:0], "no examples"),
        (GOOD[0], GOOD[1].astype(float), "labels are float64"),
        (GOOD[0], np.array([0, -1, 0]), "label -1 of example 1"),
        (GOOD[0], np.array([0, 0, 2**40]), "of example 2 is out of range"),
        (GOOD[0], np.eye(3, dtype=int), "argmax"),
        (GOOD[1], GOOD[1], "x has shape (3,)"),
        (np.array([["a"]] * 3), GOOD[1], "x has dtype <U1"),
        (np.array([[None]] * 3), GOOD[1], "x has dtype object"),
        ([[1], [2, 3], [4]], GOOD[1], "x (list) is no array"),
        (np.full((3, 2), 1e300), GOOD[1], "example 0 holds inf"),
    ],
)
@pytest.mark.parametrize("split", [0, 1])
def test_bad_arrays_are_refused_naming_their_source(x, y, words, split):
    splits = [(x, y), GOOD] if split == 0 else [GOOD, (x, y)]
    message = refusal(from_arrays, "a", *splits, WHERE)
    assert words in message and message.startswith(WHERE[split])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_with_their_first_index(value, monkeypatch):
    monkeypatch.setattr("towers.datasets.dataset._VALUES_AT_ONCE", 12)  # 2 examples at once
    x = np.zeros((7, 3, 2), np.float32)
    x[5, 2, 1] = x[6, 0, 0] = value
    message = refusal(datasets.check_arrays, x, np.zeros(7, int), 1, "file.npz")
    assert message.startswith("file.npz: example 5 ")
    assert str(value) in message and "x[5, 2, 1]" in message


# Names


def test_unknown_data_set_lists_the_names_the_nearest_and_the_form():
    message = refusal(load, "fashion-mnist")
    names = "mnist, fashion_mnist, cifar10, music, image_folder, npz, synthetic"
    assert names in message
    assert "package.module:function" in message and "Did you mean 'fashion_mnist'?" in message


@pytest.mark.parametrize("name", ["synthetic", "json:loads"])
def test_data_dir_where_nothing_is_read_from_it_is_refused(name):
    assert "--data_dir (somewhere) has no effect" in refusal(load, name, "somewhere")
