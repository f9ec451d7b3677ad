"""Folders of images: which are read, in what order and size; and what is refused."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from towers.app import datasets
from towers.app.datasets import image_folder
from towers.app.datasets.image_folder import load_flat


def load(path):
    data_dir = None if path is None else str(path)
    return datasets.load("image_folder", data_dir, input_shape=(1,), num_classes=2)


def refusal(path):
    with pytest.raises(ValueError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path, value, shape=(4, 5, 1), encode=tf.io.encode_png):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(np.full(shape, value, np.uint8)).numpy())


@pytest.fixture
def split_folder(tmp_path):
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


def test_images_come_by_class_then_by_name(split_folder):
    dataset = load(split_folder)
    assert numbers(dataset.train) == [(5, 0), (1, 0), (0, 0), (4, 1), (3, 1), (2, 1)]
    assert numbers(dataset.test) == [(6, 0), (7, 1)]
    assert (dataset.input_shape, dataset.num_classes) == ((4, 5, 1), 2)


def test_classes_and_test_examples_have_the_names_of_their_folders_and_files(split_folder):
    dataset = load(split_folder)
    assert dataset.class_names == ["a", "b"]
    assert dataset.test_names == ["test/a/k.png", "test/b/k.png"]


@pytest.mark.parametrize("shape, expected", [
    ((8, 9, 3), (8, 9, 3)), ((None, None, 1), (4, 5, 1)), ((8, None, None), (8, 5, 1)),
    ((), (4, 5, 1)),
])
def test_a_flat_folder_is_read_by_name_in_the_models_size(shape, expected, tmp_path):
    for index, name in enumerate(("z", "b", "a")):
        write(tmp_path / f"{name}.png", index)
    (tmp_path / "notes.txt").write_text("no image")
    dataset = load_flat(str(tmp_path), shape)
    assert dataset.test_names == ["a.png", "b.png", "z.png"] and dataset.class_names == ()
    assert dataset.input_shape == dataset.test.shape == expected
    assert numbers((dataset.test.decoded(), dataset.test.labels)) == [(2, 0), (1, 0), (0, 0)]


def test_a_folder_with_classes_is_not_flat_and_a_flat_one_trains_nothing(split_folder):
    assert load_flat(str(split_folder), ()) is None
    assert load_flat(str(split_folder / "train"), ()) is None
    assert "holds no folder, one for each class" in refusal(split_folder / "train" / "a")


def test_val_is_taken_where_both_are_there(split_folder):
    (split_folder / "test").rename(split_folder / "val")
    assert numbers(load(split_folder).test) == [(6, 0), (7, 1)]
    (split_folder / "test").mkdir()
    assert numbers(load(split_folder).test) == [(6, 0), (7, 1)]


def test_hidden_and_other_files_are_passed_over(split_folder):
    (split_folder / "train" / "a" / ".hidden.png").write_bytes(b"no image")
    (split_folder / "train" / "a" / "notes.txt").write_bytes(b"no image")
    (split_folder / "train" / "a" / "folder.png").mkdir()
    (split_folder / "train" / ".cache").mkdir()
    assert len(numbers(load(split_folder).train)) == 6


def test_folders_below_a_class_are_its_images_in_the_order_of_keras(tmp_path, monkeypatch):
    for name in ("z", "b/2", "b/1", "b-a/1", "b/a/1", "B/1", "a.dir/1", "-/1"):
        write(tmp_path / "train" / "dog" / f"{name}.png", 1)
    for name in ("train/cat/1", "val/cat/1", "val/dog/new/1"):
        write(tmp_path / f"{name}.png", 2)
    found = keras.utils.image_dataset_from_directory(
        tmp_path / "train", image_size=(4, 5), shuffle=False, verbose=False
    ).file_paths
    monkeypatch.setattr(image_folder, "MEMORY_SHARE", 0)
    dataset = load(tmp_path)
    assert [f"{tmp_path}/{name}" for name in dataset.train.names] == found and len(found) == 9
    assert dataset.test_names == ["val/cat/1.png", "val/dog/new/1.png"]
    assert dataset.warnings == []


def test_files_that_are_not_used_are_counted_by_their_suffixes(split_folder):
    folder = split_folder / "train" / "a"
    for name in ("a.heic", "b.HEIC", "c.txt", "README"):
        (folder / name).write_bytes(b"")
    write(split_folder / "train" / "beside.png", 1)
    (folder / "linked").symlink_to(split_folder / "train" / "b")
    assert load(split_folder).warnings == [
        f"{split_folder} holds files that are not used: .heic (2), .txt (1), beside the classes' "
        "folders (1), links to folders (1), without a suffix (1)."
    ]
    for path in (split_folder / "test" / "a").iterdir():
        path.rename(path.with_suffix(".heic"))
    assert refusal(split_folder).endswith("a holds files that are not used: .heic (1).")


def test_images_of_all_kinds_are_taken_and_gray_ones_of_any_kind_made_gray(tmp_path):
    for index, suffix in enumerate(image_folder.SUFFIXES):
        for path in (tmp_path / part / f"{index % 2}" / f"x{suffix}" for part in ("train", "val")):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (10, 20, 30)).save(path)
    dataset = load(tmp_path)
    assert len(dataset.train[0]) == len(image_folder.SUFFIXES) and dataset.warnings == []
    pixels = dataset.train[0][:, 9, 9] * 255
    np.testing.assert_allclose(pixels, [[10, 20, 30]] * len(pixels), atol=4)
    gray = datasets.load(
        "image_folder", str(tmp_path), input_shape=(1,), num_classes=2, image_size=(32, 32, 1)
    )
    np.testing.assert_allclose(gray.train[0][:, 9, 9] * 255, [[18]] * len(gray.train[0]), atol=4)


@pytest.mark.parametrize("name", ["VAL", "Test", "validation", "valid"])
def test_the_folders_of_a_split_may_be_in_capitals(split_folder, name):
    (split_folder / "train").rename(split_folder / "Train")
    (split_folder / "test").rename(split_folder / name)
    assert numbers(load(split_folder).test) == [(6, 0), (7, 1)]


def test_a_directory_that_is_one_level_too_high_is_refused_with_the_right_one(split_folder):
    for part in ("train", "test"):
        (split_folder / "photos").mkdir(exist_ok=True)
        (split_folder / part).rename(split_folder / "photos" / part.title())
    assert f"use data_dir={split_folder}/photos, or give" in refusal(split_folder)


def test_a_class_without_an_image_to_train_or_test_on_is_warned_of(tmp_path):
    for index in range(40):
        write(tmp_path / "a" / f"{index}.png", index)
    for name in ("b/0.png", "c/2.png"):  # their hashes: one tests, the other trains
        write(tmp_path / name, 1)
    said = load(tmp_path).warnings
    assert [line.partition(". ")[0] for line in said] == [
        "1 of 3 classes have no image to train on, such as b",
        "1 of 3 classes have no image to test on, such as c",
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


def test_pixels_are_scaled_to_0_to_1_and_colors_kept(tmp_path):
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3) * 4
    for name in ("train/a/1.png", "val/a/1.png"):
        write(tmp_path / name, 0)
        (tmp_path / name).write_bytes(tf.io.encode_png(pixels).numpy())
    dataset = load(tmp_path)
    np.testing.assert_array_equal(dataset.train[0][0], pixels / np.float32(255))
    assert dataset.input_shape == (4, 5, 3)


def test_others_are_squeezed_to_the_most_frequent_size_and_that_is_said(split_folder):
    assert load(split_folder).notes == ["images of 4x5x1 (height x width x channels)"]
    assert load(split_folder).warnings == []
    write(split_folder / "train" / "a" / "0.png", 99, (40, 3, 3))
    write(split_folder / "test" / "b" / "0.png", 98, (4, 5, 3))
    dataset = load(split_folder)
    assert dataset.train[0].shape == (7, 4, 5, 1)
    assert numbers(dataset.train)[0] == (99, 0)
    assert dataset.warnings == [
        "2 of 10 images are not of the most frequent size and channels, 4x5x1, such as "
        "train/a/0.png (40x3x3): they are resized to it, whatever their aspect. image_size=HxWxC "
        "names another."
    ]


def test_photos_of_many_sizes_are_in_color_whatever_a_few_thumbnails_are(tmp_path):
    for index in range(6):
        write(tmp_path / "train" / "a" / f"{index}.jpg", 9, (20 + index, 30, 3), tf.io.encode_jpeg)
    for name in ("train/a/+1.png", "train/a/+2.png", "val/a/1.png"):
        write(tmp_path / name, 9, (7, 9, 1))
    assert load(tmp_path).input_shape == (7, 9, 3)


def test_of_a_large_folder_only_some_are_looked_at_all_over_it(tmp_path, monkeypatch):
    for index in range(12):
        shape = (4, 5, 1) if index < 8 else (6, 6, 3)
        write(tmp_path / "train" / "a" / f"{index:02}.png", 9, shape)
    write(tmp_path / "val" / "a" / "1.png", 9)
    monkeypatch.setattr(image_folder, "LOOKED_AT", 4)
    dataset = load(tmp_path)  # 0, 3, 6 and 9
    assert dataset.input_shape == (4, 5, 1)
    assert dataset.warnings[0].startswith("1 of 5 images looked at, of 13, are not of the most ")


@pytest.mark.parametrize(("asked", "shape"), [((8, 6, 3), (8, 6, 3)), ((8, 6, None), (8, 6, 1))])
def test_a_size_that_is_asked_for_is_that_of_all(split_folder, asked, shape):
    write(split_folder / "train" / "a" / "0.png", 99, (40, 3, 3))
    dataset = datasets.load(
        "image_folder", str(split_folder), input_shape=(1,), num_classes=2, image_size=asked
    )
    assert dataset.input_shape == shape and dataset.train[0].shape[1:] == shape
    assert dataset.warnings == []


def test_a_size_is_refused_for_other_data():
    with pytest.raises(ValueError, match=r"^image_size \(8x6\) is of dataset=image_folder"):
        datasets.load("mnist", input_shape=(1,), num_classes=2, image_size=(8, 6, None))


@pytest.mark.parametrize("channels, kept", [(1, 1), (2, 1), (3, 3), (4, 3)])
def test_transparency_is_ignored(tmp_path, channels, kept):
    for name in ("train/a/1.png", "val/a/1.png"):
        write(tmp_path / name, 7, (3, 3, channels))
    dataset = load(tmp_path)
    assert dataset.input_shape == (3, 3, kept) and numbers(dataset.train) == [(7, 0)]


GIF = bytes.fromhex(  # 1 x 1, red, two frames
    "47494638396101000100800000ff0000000000"
    "2c000000000100010000020244010021f90400000000002c00000000010001000002024401003b"
)
BMP = b"BM" + bytes.fromhex(  # 1 x 1, 24 bits: blue, green, red
    "3a0000000000000036000000280000000100000001000000010018000000000004000000"
    "00000000000000000000000000000000" "0000ff00"
)


@pytest.mark.parametrize("name, content", [("x.GIF", GIF), ("x.bmp", BMP), ("x.jpeg", None)])
def test_gif_bmp_and_jpeg_are_read(tmp_path, name, content):
    red = np.zeros((1, 1, 3), np.uint8)
    red[..., 0] = 254
    content = content or tf.io.encode_jpeg(red, quality=100).numpy()
    for part in ("train", "val"):
        write(tmp_path / part / "a" / name, 0)
        (tmp_path / part / "a" / name).write_bytes(content)
    np.testing.assert_allclose(load(tmp_path).train[0], [[[[1, 0, 0]]]], atol=2 / 255)  # JPEG's


BAD = [b"", b"no image", b"\x89PNG\r\n\x1a\n" + bytes(30), b"\xff\xd8\xff\xe0" + bytes(50),
       GIF[:20], BMP[:30]]


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("name", ["train/a/x.png", "train/b/20.png", "test/b/k.png"])
def test_a_corrupt_image_is_refused_naming_its_file(split_folder, name, content):
    path = split_folder / name
    path.write_bytes(content)
    message = refusal(split_folder)
    assert message.startswith(f"{path} cannot be decoded: ")
    assert "{{" not in message and "[" not in message and "Iterator" not in message


def test_a_truncated_image_is_refused(split_folder):
    path = split_folder / "train" / "a" / "y.png"
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path} cannot be decoded: Invalid PNG data" in refusal(split_folder)


def test_no_directory_is_refused_with_the_forms():
    assert "dataset=image_folder needs data_dir=DIR" in refusal(None)


def test_a_missing_path_a_file_and_an_empty_directory_are_refused(tmp_path):
    assert "nothing cannot be read: No such file" in refusal(tmp_path / "nothing")
    assert "holds no folder, one for each class" in refusal(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    assert "file cannot be read: Not a directory" in refusal(tmp_path / "file")


def test_a_class_without_images_is_refused_naming_it(split_folder):
    shutil.rmtree(split_folder / "test" / "b")
    (split_folder / "test" / "b").mkdir()
    assert f"{split_folder}/test/b holds no image (.jpg, " in refusal(split_folder)


def test_different_classes_are_refused_naming_them(split_folder):
    write(split_folder / "test" / "c" / "1.png", 0)
    assert "have different classes: c in only one" in refusal(split_folder)


def test_train_or_test_alone_is_refused(split_folder):
    shutil.rmtree(split_folder / "train")
    assert "holds test, but no folder train" in refusal(split_folder)
    (split_folder / "test").rename(split_folder / "train")
    assert "holds train, but no folder val or valid or validation or test" in refusal(split_folder)


def test_too_few_images_to_divide_are_refused(tmp_path):
    write(tmp_path / "a" / "1.png", 0)
    assert "1 images are too few" in refusal(tmp_path)
