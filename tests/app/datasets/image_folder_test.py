"""Folders of images: which are read, in what order and size; and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.loading import refusal
from towers.app import datasets
from towers.app.datasets import dataset as dataset_lib
from towers.app.datasets import image_folder
from towers.app.datasets.image_folder import load_flat


def load(path, image_size=None):
    data_dir = None if path is None else str(path)
    return datasets.load(
        "image_folder", data_dir, input_shape=(1,), num_classes=2, image_size=image_size
    )


def write(path, value, shape=(4, 5, 1), encode=tf.io.encode_png):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(np.full(shape, value, np.uint8)).numpy())


@pytest.fixture
def folder(tmp_path):
    """Classes b and a; an image's pixels are its number: 0 ... 5 to train, 6 and 7 to test on."""
    for index, name in enumerate(("a/z", "a/y", "b/3", "b/20", "b/1", "a/x")):
        write(tmp_path / "train" / f"{name}.png", index)
    for index, name in enumerate(("a/k", "b/k"), 6):
        write(tmp_path / "test" / f"{name}.png", index)
    return tmp_path


def numbers(split):
    """The number that fills each image, and its label."""
    x, y = split
    assert x.dtype == np.float32 and y.dtype == np.int32
    return [(round(float(image.mean()) * 255), int(label)) for image, label in zip(x, y)]


@pytest.mark.parametrize("name", ["Test", "VAL", "validation"])
def test_images_come_by_class_then_by_name(folder, name):
    (folder / "test").rename(folder / name)
    dataset = load(folder)
    assert numbers(dataset.train) == [(5, 0), (1, 0), (0, 0), (4, 1), (3, 1), (2, 1)]
    assert numbers(dataset.test) == [(6, 0), (7, 1)]
    assert (dataset.input_shape, dataset.num_classes) == ((4, 5, 1), 2)
    assert dataset.class_names == ["a", "b"]
    assert dataset.test_names == [f"{name}/a/k.png", f"{name}/b/k.png"]
    assert (dataset.warnings, len(dataset.notes)) == ([], 1)
    if name == "VAL":  # a test folder beside it often has no labels
        (folder / "test").mkdir()
        assert numbers(load(folder).test) == [(6, 0), (7, 1)]


@pytest.mark.parametrize(
    "shape, expected",
    [
        ((8, 9, 3), (8, 9, 3)),
        ((None, None, 1), (4, 5, 1)),
        ((), (4, 5, 1)),
    ],
)
def test_a_flat_folder_is_read_by_name_in_the_models_size(shape, expected, tmp_path, folder):
    flat = tmp_path / "flat"
    for index, name in enumerate(("z", "b", "a")):
        write(flat / f"{name}.png", index)
    (flat / "notes.txt").write_text("no image")
    dataset = load_flat(str(flat), shape)
    assert dataset.test_names == ["a.png", "b.png", "z.png"] and dataset.class_names == ()
    assert dataset.input_shape == dataset.test.shape == expected
    assert numbers((dataset.test.decoded(), dataset.test.labels)) == [(2, 0), (1, 0), (0, 0)]
    assert load_flat(str(folder), ()) is None
    assert "holds no folder, one for each class" in refusal(load, flat)


def test_folders_below_a_class_are_its_images_in_the_order_of_keras(tmp_path, monkeypatch):
    for name in ("z", "b/2", "b/1", "b-a/1", "b/a/1", "B/1", "a.dir/1", "-/1"):
        write(tmp_path / "train/dog" / f"{name}.png", 1)
    for name in ("train/cat/1", "val/cat/1", "val/dog/new/1"):
        write(tmp_path / f"{name}.png", 2)
    found = keras.utils.image_dataset_from_directory(
        tmp_path / "train", image_size=(4, 5), shuffle=False, verbose=False
    ).file_paths
    monkeypatch.setattr(dataset_lib, "usable_memory", lambda: 0)
    dataset = load(tmp_path)
    assert [f"{tmp_path}/{name}" for name in dataset.train.names] == found and len(found) == 9
    assert dataset.test_names == ["val/cat/1.png", "val/dog/new/1.png"]


def test_class_folders_may_be_links_as_in_keras(tmp_path):
    for index in range(20):
        write(tmp_path / "store" / f"{'ab'[index % 2]}" / "new" / f"{index}.png", index)
    top = tmp_path / "data/train"
    for folder in (top, tmp_path / "data/val"):
        folder.mkdir(parents=True)
        for name in "ab":
            (folder / name).symlink_to(tmp_path / "store" / name)
    (tmp_path / "store/a/loop").symlink_to(tmp_path / "store")
    found = keras.utils.image_dataset_from_directory(
        top, image_size=(4, 5), shuffle=False, verbose=False
    ).file_paths
    dataset = load(tmp_path / "data")
    assert len(found) == 20 and dataset.class_names == ["a", "b"]
    assert sorted(dataset.train[0][:, 0, 0, 0] * 255) == pytest.approx(range(20))
    assert "not used: links to folders (2)." in dataset.warnings[-1]


def test_files_that_are_not_used_are_counted_by_their_suffixes(folder):
    below = folder / "train/a"
    for name in ("a.heic", "b.HEIC", "c.txt", "README", ".hidden.png"):
        (below / name).write_bytes(b"")
    (folder / "train/.cache").mkdir()
    write(folder / "train/beside.png", 1)
    (below / "linked").symlink_to(folder / "train/b")
    dataset = load(folder)
    assert len(dataset.train[0]) == 6
    assert dataset.warnings == [
        f"{folder} holds files that are not used: .heic (2), .txt (1), beside the classes' "
        "folders (1), links to folders (1), without a suffix (1)."
    ]
    for path in (folder / "test/a").iterdir():
        path.rename(path.with_suffix(".heic"))
    assert f"{folder}/test/a holds no image (.jpg, " in refusal(load, folder)
    assert ".heic (3)" in refusal(load, folder)


def test_images_of_all_kinds_are_taken_and_gray_ones_of_any_kind_made_gray(tmp_path):
    for index, suffix in enumerate(image_folder.SUFFIXES):
        for path in (tmp_path / part / f"{index % 2}" / f"x{suffix}" for part in ("train", "val")):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (10, 20, 30)).save(path)
    dataset = load(tmp_path)
    assert len(dataset.train[0]) == len(image_folder.SUFFIXES) and dataset.warnings == []
    pixels = dataset.train[0][:, 9, 9] * 255
    np.testing.assert_allclose(pixels, [[10, 20, 30]] * len(pixels), atol=4)
    gray = load(tmp_path, (32, 32, 1))
    np.testing.assert_allclose(gray.train[0][:, 9, 9] * 255, [[18]] * len(gray.train[0]), atol=4)


def test_a_class_without_an_image_to_train_or_test_on_is_warned_of(tmp_path):
    for index in range(40):
        write(tmp_path / "a" / f"{index}.png", index)
    for name in ("b/0.png", "c/2.png"):  # their hashes: one tests, the other trains
        write(tmp_path / name, 1)
    said = [line.partition(". ")[0] for line in load(tmp_path).warnings]
    assert said == [
        f"1 of 3 classes have no image to {use} on, such as {name}"
        for use, name in (("train", "b"), ("test", "c"))
    ]


def test_every_fifth_image_tests_by_its_own_name(tmp_path):
    for index in range(200):
        write(tmp_path / f"class {index % 2}" / f"{index}.png", index)
    before = load(tmp_path)
    test = numbers(before.test)
    assert 25 <= len(test) <= 55 and len(test) + len(numbers(before.train)) == 200
    assert not set(test) & set(numbers(before.train))
    assert all(number % 2 == label for number, label in test)
    for index in range(200, 220):
        write(tmp_path / "class 1" / f"{index}.png", index)
    assert set(test) <= set(numbers(load(tmp_path).test))


def test_others_are_squeezed_to_the_most_frequent_size_and_that_is_said(folder):
    write(folder / "train/a/0.png", 99, (40, 3, 3))
    dataset = load(folder)
    assert dataset.notes == ["images of 4x5x1 (height x width x channels)"]
    assert dataset.train[0].shape == (7, 4, 5, 1)
    assert numbers(dataset.train)[0] == (99, 0)
    assert dataset.warnings == [
        "1 of 7 training images do not have the most frequent size and channels, 4x5x1, such as "
        "train/a/0.png (40x3x3). They are resized. To choose another size, set image_size=HxWxC."
    ]
    for asked, shape in (((8, 6, 3), (8, 6, 3)), ((8, 6, None), (8, 6, 1))):
        dataset = load(folder, asked)
        assert dataset.input_shape == shape == dataset.train[0].shape[1:]
        assert dataset.warnings == []


def test_photos_of_many_sizes_are_in_color_whatever_a_few_thumbnails_are(tmp_path):
    for index in range(6):
        write(tmp_path / "train/a" / f"{index}.jpg", 9, (20 + index, 30, 3), tf.io.encode_jpeg)
    for name in ("train/a/+1.png", "train/a/+2.png", "val/a/1.png"):
        write(tmp_path / name, 9, (7, 9, 1))
    assert load(tmp_path).input_shape == (7, 9, 3)


def test_of_a_large_folder_only_some_are_looked_at_all_over_it(tmp_path, monkeypatch):
    for index in range(12):
        shape = (4, 5, 1) if index < 8 else (6, 6, 3)
        write(tmp_path / "train/a" / f"{index:02}.png", 9, shape)
    write(tmp_path / "val/a/1.png", 9)
    monkeypatch.setattr(image_folder, "LOOKED_AT", 4)
    dataset = load(tmp_path)  # 0, 3, 6 and 9
    assert dataset.input_shape == (4, 5, 1)
    assert dataset.warnings[0].startswith("1 of 4 training images do not have the most ")


def test_postscript_is_no_image_whatever_its_suffix(folder):
    page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 5\n%%EndComments\n"
    (folder / "train/a/x.png").write_bytes(page)
    assert "it is no image that Pillow knows" in refusal(load, folder)


def moved(folder):
    """One level too high."""
    (folder / "photos").mkdir()
    for part in ("train", "test"):
        (folder / part).rename(folder / "photos" / part.title())


@pytest.mark.parametrize(
    "change, message",
    [
        (moved, "/photos, or give"),
        (
            lambda folder: write(folder / "test/c/1.png", 0),
            "different classes: c in only one",
        ),
        (
            lambda folder: (folder / "train").rename(folder / "val"),
            "holds test, val, but no folder t",
        ),
        (
            lambda folder: (folder / "test").rename(folder / "others"),
            "but no folder val or valid or v",
        ),
    ],
)
def test_folders_that_are_no_split_are_an_error_with_the_forms(folder, change, message):
    change(folder)
    assert message in refusal(load, folder)


def test_no_directory_or_too_few_images_are_an_error(tmp_path):
    assert "dataset=image_folder needs data_dir=DIR" in refusal(load, None)
    assert "nothing): No such file" in refusal(load, tmp_path / "nothing")
    assert "holds no folder, one for each class" in refusal(load, tmp_path)
    write(tmp_path / "a/1.png", 0)
    assert "holds too few images" in refusal(load, tmp_path)
