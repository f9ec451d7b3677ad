"""Arrays of any kind, NumPy archives and functions of the user: what is taken, what is refused."""

import os
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from tests.loading import load, refusal
from towers.app import datasets
from towers.app.datasets import npz
from towers.app.datasets.user import from_splits
from towers.machine import files

A = np.arange(12, dtype="float64").reshape(4, 3)
GOOD = (np.zeros((3, 2), np.float32), np.array([0, 1, 1]))


def of_custom_loss(train, test=None):
    return from_splits("mine", train, test, custom_loss=True)


def split(value):
    return of_custom_loss(value).train


def test_labels_of_shape_n_by_1_are_taken_and_counted_over_both_splits():
    x = np.zeros((2, 3))
    dataset = from_splits("a", (x, [[0], [1]]), (x, [[0], [6]]))
    assert dataset.num_classes == 7 and dataset.test[1].tolist() == [0, 6]
    assert dataset.train[1].dtype == np.int32 and dataset.train[0].dtype == np.float32


@pytest.mark.parametrize(
    "x, y, words",
    [
        (GOOD[0], GOOD[1][:2], "3 examples, but 2 labels"),
        (GOOD[0][:0], GOOD[1][:0], "no examples"),
        (GOOD[0], GOOD[1].astype(float), "labels are float64"),
        (
            GOOD[0],
            np.array([0, -1, 0]),
            "label -1 of example 1 is out of range; number the classes 0,",
        ),
        (GOOD[0], np.eye(3, dtype=int), "argmax"),
        (np.zeros((3, 0)), GOOD[1], "x has shape (3, 0)"),
        (np.array([[None]] * 3), GOOD[1], "x has dtype object"),
        ([[1], [2, 3], [4]], GOOD[1], "x (list) is no array"),
        (np.array([[0, 1e300]] * 3), GOOD[1], "example 0 holds inf (at x[0, 1])"),
    ],
)
def test_arrays_that_are_no_classes_are_an_error_that_names_the_split(x, y, words):
    for name, splits in (("train", [(x, y), GOOD]), ("test", [GOOD, (x, y)])):
        message = refusal(from_splits, "a", *splits)
        assert words in message and message.startswith(f"a ({name}): ")


# Of any structure
def test_floats_become_keras_floats_and_all_else_stays():
    x = {"a": A, "b": np.arange(4, dtype="uint8"), "c": np.array([True, False, True, False])}
    found, y = split((x, np.arange(4, dtype="int64")))
    assert {k: v.dtype.name for k, v in found.items()} == {
        "a": "float32",
        "b": "uint8",
        "c": "bool",
    }
    assert y.dtype == np.int64
    np.testing.assert_array_equal(found["a"], A)


def test_a_list_of_arrays_is_several_inputs_and_a_list_of_numbers_one():
    ((a, b), y) = split(([A, A + 1], [1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_array_equal(b, a + 1)
    assert y.shape == (4,)


def test_a_data_set_knows_the_shape_of_an_example_and_no_classes():
    dataset = of_custom_loss((A, A), (A[:1], A[:1]))
    assert (dataset.input_shape, dataset.num_classes, len(dataset.test[0])) == ((3,), None, 1)
    assert of_custom_loss({"a": A}).input_shape == {"a": (3,)}
    assert len(split(A)) == len(split((A, None))) == 1
    assert [part.shape for part in split((A, A, np.ones(4)))] == [(4, 3), (4, 3), (4,)]


@pytest.mark.parametrize(
    "value, message",
    [
        (({"a": A}, A[:3]), r"parts differ in length: x\['a'\] 4, y 3 examples"),
        (({"a": A * 1j}, A), r"x\['a'\] has dtype complex128.*give both parts"),
        (({"a": np.array(["x"] * 4)}, A), r"x\['a'\] has dtype <U1.*TextVectorization"),
        ((A, [[1], [1, 2], [3], [4]]), r"y \(list\) is no array .*: pad its rows .* tf.Ragged"),
        ((A, 3.0), "y is one number, but must be"),
        ((A, np.where(A > 6, np.nan, A)), r"example 2 holds nan \(at y\[2, 1\]\)"),
        ((A, None, np.ones(4)), "sample weights need y"),
    ],
)
def test_what_is_no_such_data_is_refused_in_one_line(value, message):
    with pytest.raises(ValueError, match=rf"mine \(train\): .*{message}") as error:
        split(value)
    assert "\n" not in str(error.value)


def test_train_and_test_have_one_shape():
    with pytest.raises(ValueError, match=r"mine \(test\): examples have shapes \(2,\) and \(3,\)"):
        of_custom_loss((A, A), (A[:, :2], A))
    of_custom_loss((A, A, np.ones(4)), (A, A))  # validation may be without weights


def test_a_tf_data_dataset_of_structures_stays_as_it_is():
    dataset = tf.data.Dataset.from_tensor_slices(({"a": A}, A))
    assert of_custom_loss(dataset, dataset).train is dataset
    for wrong in (tf.data.Dataset.range(3).window(2), tf.data.Dataset.from_tensors("text")):
        with pytest.raises(ValueError, match=r"mine \(train\): .* numbers: dense, ragged or spars"):
            of_custom_loss(wrong)


# NumPy archives, whole, damaged and hostile
@pytest.fixture
def archive(tmp_path):
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


def test_object_array_is_refused_and_its_payload_never_runs(archive, tmp_path):
    trace = tmp_path / "payload_ran"
    path = archive(y_test=np.array([Payload(str(trace))] * 3, object))
    message = refusal(load, "npz", path)
    assert path in message and "Python objects are never loaded" in message
    assert not trace.exists()
    with np.load(path, allow_pickle=True) as trusted:  # the payload is a live one
        trusted["y_test"]
    assert trace.exists()


def test_an_error_names_the_file_and_what_is_wrong(archive, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_bytes(b"x_train,y_train\n")
    x = np.zeros((3, 4, 5))
    x[1, 0, 0] = np.nan
    assert "y_train is not a file in the archive" in refusal(load, "npz", archive(y_train=None))
    for path, message in (
        (archive(x_test=x), "(x_test, y_test): example 1 holds nan"),
        (str(tmp_path / "nothing.npz"), "No such file or directory"),
        (str(tmp_path), "it is no regular"),
        (str(tmp_path / "pipe"), "it is no regular file"),
        (str(tmp_path / "text"), "not an .npz"),
    ):
        told = refusal(load, "npz", path)
        assert told.startswith(path) and message in told
    assert "dataset=npz needs data_dir=FILE.npz" in refusal(load, "npz")


def test_a_small_archive_that_would_fill_the_memory_is_an_error(tmp_path, monkeypatch):
    """Python counts the memory that NumPy takes, too."""
    monkeypatch.setattr(files, "EXPANDED", 2**20)
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for key in npz.KEYS:
            with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                header = {"descr": "|u1", "fortran_order": False, "shape": (2**23, 1)}
                np.lib.format.write_array_header_1_0(member, header)
                member.write(bytes(2**23 if key == "x_train" else 0))
    assert path.stat().st_size < 10_000
    tracemalloc.start()
    told = refusal(load, "npz", str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "expand to 8,38" in told and "more than 1,048,576, unless it is written without" in told
    assert peak < 2**20


def test_arrays_that_exceed_the_memory_are_an_error(archive, monkeypatch):
    monkeypatch.setattr(npz, "usable_memory", lambda: 200)
    assert "bytes, more than this machine's memory" in refusal(load, "npz", archive())


def test_a_damaged_archive_is_an_error_with_its_name(archive):
    path = archive()
    with open(path, "rb") as file:
        content = file.read()
    dataset = load("npz", path)
    assert (dataset.input_shape, dataset.num_classes, dataset.name) == ((4, 5), 6, "npz")
    errors = 0
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
                errors += 1
    assert errors > len(content) / 37  # each that is cut, and flips of what counts


# Functions of the user: package.module:function
@pytest.fixture
def user_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    header = "import numpy as np, tensorflow as tf\n"
    yield lambda text: (tmp_path / "user_data.py").write_text(header + text)
    sys.modules.pop("user_data", None)


SLICES = "tf.data.Dataset.from_tensor_slices((np.zeros((5, 2)), np.arange(5) % 3))"


def test_user_arrays_are_read(user_module):
    code = "def load(): return (np.zeros((5, 2)), np.arange(5)), [np.ones((2, 2)), [0, 1]]"
    user_module(f"NUM_CLASSES = 8\n{code}")
    dataset = load("user_data:load")
    assert (dataset.name, dataset.input_shape, dataset.num_classes) == ("user_data:load", (2,), 8)
    assert dataset.test[0].dtype == np.float32 and datasets.num_examples(dataset.train) == 5


def test_user_tf_data_is_read_and_counted(user_module):
    user_module(f"def load(): return {SLICES}, {SLICES}.filter(lambda x, y: y < 2)")
    dataset = load("user_data:load")
    assert (dataset.input_shape, dataset.num_classes) == ((2,), 3)
    assert datasets.num_examples(dataset.train) == 5
    assert datasets.num_examples(dataset.test) == 4  # a filter does not know its count
    assert isinstance(dataset.train, tf.data.Dataset)


@pytest.mark.parametrize(
    "expression, words",
    [
        ("None", "returned a NoneType"),
        (f"({SLICES}.batch(2),) * 2", "add .unbatch()"),
        (f"({SLICES}.repeat(),) * 2", "repeats forever"),
        (f"({SLICES}.take(0),) * 2", "no examples"),
        (f"({SLICES}.map(lambda x, y: x),) * 2", "must be (x, y)"),
        (f"({SLICES}.map(lambda x, y: (x, tf.cast(y, tf.float32))),) * 2", "y is float32"),
        (f"({SLICES}.map(lambda x, y: (x, y - 1)),) * 2", "label -1"),
        (f"({SLICES}.map(lambda x, y: (x[:y], y)),) * 2", "unknown shape"),
    ],
)
def test_user_function_that_returns_something_else_is_refused(user_module, expression, words):
    user_module(f"def load(): return {expression}")
    message = refusal(load, "user_data:load")
    assert words in message and "user_data:load" in message
