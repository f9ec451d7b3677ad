"""Images that are decoded while training runs: the same as in memory, from any step; and faults."""

import io
import json
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import ExifTags, Image

import towers
from tests import loading
from towers.app.after_training.model_files import file_config
from towers.app.after_training.predicting import evaluate_file
from towers.app.config import TrainConfig
from towers.app.continued import continued_config
from towers.resume.epoch import Epoch
from towers.app.datasets import batches as input_lib, dataset
from towers.app.datasets.image_folder import ImageFiles, decode, image_shape
from towers.app.reporting.report import Report

NUM_TRAIN, NUM_TEST, BATCH = 23, 11, 5


@pytest.fixture
def folder(tmp_path):
    """JPEG and PNG images in 2 classes, some of other sizes than the first one."""
    generator = np.random.default_rng(0)
    for index in range(NUM_TRAIN + NUM_TEST):
        part = "train" if index < NUM_TRAIN else "val"
        height = 9 if index % 4 == 3 else 6
        pixels = generator.integers(0, 256, (height, 7, 3), np.uint8)
        name = f"{index:02}.{('png', 'jpg')[index % 2]}"
        path = tmp_path / "images" / part / f"class {index % 2}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        loading.write_pixels(path, pixels)
    return tmp_path / "images"


@pytest.fixture
def _streamed(monkeypatch):
    monkeypatch.setattr(dataset, "usable_memory", lambda: 0)


def load_examples(folder):
    """Of both splits."""
    dataset = loading.load("image_folder", str(folder))
    return [input_lib.load_examples(split) for split in (dataset.train, dataset.test)]


def bits(batches):
    return [[(t.dtype, t.shape, t.numpy().tobytes()) for t in batch] for batch in batches]


def damage(path):
    """Puts as many other bytes in its place; returns what was there."""
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    return content


def order(epoch, seed=0):
    """Which images an epoch trains on, one after the other: those of any indexed examples."""
    numbers = input_lib.load_examples((np.arange(NUM_TRAIN),))
    ((x,),) = numbers.batches(Epoch(NUM_TRAIN, seed, epoch))
    return x.numpy()


def path_of(examples, place):
    return examples.source.directory / examples.source.names[place]


def test_images_that_take_more_than_a_share_of_the_memory_give_the_same_batches(
    folder, monkeypatch
):
    in_memory = load_examples(folder)
    memory = {
        "SC_PHYS_PAGES": 4 * 6 * 7 * 3 * 4,  # four images in float32
        "SC_PAGE_SIZE": NUM_TRAIN + NUM_TEST,
    }
    monkeypatch.setattr(dataset.os, "sysconf", memory.get)
    assert isinstance(loading.load("image_folder", str(folder)).train, tuple)
    memory["SC_PAGE_SIZE"] -= 1
    streamed = load_examples(folder)
    for one, other in zip(in_memory, streamed, strict=True):
        assert (one.source.how, other.source.how) == ("", "decoded while training runs")
        assert one.num_examples == other.num_examples and one.specs == other.specs
        one, other = (each.batches(Epoch(BATCH, 7, 1)) for each in (one, other))
        assert bits(one) == bits(other)


@pytest.mark.usefixtures("_streamed")
def test_a_later_start_decodes_only_what_is_left(folder):
    """All images of the steps before are damaged."""
    train, _ = load_examples(folder)
    whole = bits(train.batches(Epoch(BATCH, seed=1, number=2)))
    for start_step in 1, 2, 4:
        for index in order(2, seed=1)[: BATCH * start_step]:
            damage(path_of(train, index))
        batches = train.batches(Epoch(BATCH, 1, 2, start_step))
        assert bits(batches) == whole[start_step:]


@pytest.mark.usefixtures("_streamed")
def test_the_digest_is_that_of_names_sizes_and_labels(folder):
    def digests():
        return [input_lib.digest(examples) for examples in load_examples(folder)]

    before = digests()
    folder = folder.rename(folder.parent / "moved")
    assert digests() == before
    path = folder / "train/class 1/01.jpg"
    path.write_bytes(path.read_bytes()[:-9] + bytes(9))
    assert digests() == before
    for change in (
        lambda: loading.write_pixels(folder / "train/class 1/01.jpg", np.zeros((2, 2, 3))),
        lambda: (folder / "train/class 1/01.jpg").rename(folder / "train/class 1/02.jpg"),
        lambda: (folder / "train/class 1/02.jpg").rename(folder / "train/class 0/02.jpg"),
    ):
        change()
        after = digests()
        assert after[0] != before[0] and after[1] == before[1]
        before = after


@pytest.mark.usefixtures("_streamed")
@pytest.mark.telling("damage", "unlink")
@pytest.mark.parametrize("spoil", [damage, Path.unlink, lambda p: p.write_bytes(b"")])
def test_the_first_image_that_cannot_be_decoded_is_named_in_its_turn(folder, spoil):
    train, _ = load_examples(folder)
    whole = bits(train.batches(Epoch(BATCH, 0, 0)))
    second, first = (path_of(train, order(0)[place]) for place in (14, 12))
    for path in (second, first):
        spoil(path)
    batches = iter(train.batches(Epoch(BATCH, seed=0, number=0, start_step=1)))
    assert bits([next(batches)]) == [whole[1]]
    assert loading.refusal(next, batches).startswith(f"{first} cannot be decoded: ")


def config(folder, run_dir):
    """5 steps an epoch: 23 = 4 x 5 + 3."""
    return loading.config(run_dir, "image_folder", data_dir=str(folder))


@pytest.mark.matrix
@pytest.mark.usefixtures("_streamed")
@pytest.mark.parametrize("part, saved_at", [("train", 7), ("val", 5)])
def test_a_run_that_an_image_has_ended_goes_on_to_the_same_bits(
    folder, tmp_path, capsys, part, saved_at
):
    """An image that fails from the second epoch's third step on, or in the first validation."""
    undisturbed = towers.train(config(folder, tmp_path / "once"))
    train, test = load_examples(folder)
    path = path_of(train, order(1)[2 * BATCH]) if part == "train" else path_of(test, -1)
    content = []

    class Damage(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            content.append(damage(path))

    if part == "val":
        content.append(damage(path))
    with pytest.raises(ValueError, match=f"{path} cannot be decoded"):
        towers.train(config(folder, tmp_path / "run"), [Damage()])
    assert f"saved at step {saved_at}. Resume: " in capsys.readouterr().out
    assert (tmp_path / "run/results.csv").exists() == (part == "train")  # epoch 1's row
    path.write_bytes(content[0])
    again = TrainConfig(resume=str(tmp_path / "run"), trust_run_dir=True)
    assert towers.train(again) == undisturbed
    assert loading.final_weights(tmp_path / "run") == loading.final_weights(tmp_path / "once")


def test_a_runs_size_is_recorded_and_stays_whatever_the_folder_holds_later(
    folder, tmp_path, capsys
):
    run_dir = tmp_path / "run"
    towers.train(loading.config(run_dir, "image_folder", data_dir=str(folder), epochs=0))
    model = loading.model((6, 7, 3), 2)
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.save(run_dir / "final.keras")
    said = capsys.readouterr().out
    assert "\n          images of 6x7x3 (height x width x channels)\n" in said
    assert "Warning   5 of 23 training images do not have the most frequent size" in said
    values = json.loads((run_dir / "config.json").read_text())
    assert values["image_size"] == "6x7x3"
    for path in folder.rglob("*.png"):
        loading.write_pixels(path, np.zeros((9, 9, 1)))
    given = file_config(run_dir / "final.keras", {"num_gpus": 1, "model": "tests.loading:model"})
    evaluate_file(given, run_dir / "final.keras", Report())
    assert "images of 6x7x3" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"cannot change image_size \(9x9, the run has 6x7x3\)"):
        continued_config(str(run_dir), {"image_size": "9x9", "trust_run_dir": True})


# Files of all kinds: what a header says is what is decoded, upright and in its colors
def smooth(height, width):
    """Pixels that JPEG keeps."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 255 / height, columns * 255 / width, 255 - rows * 255 / height], 2)


COLORS = Image.fromarray(smooth(40, 60).astype(np.uint8))
TWELVE_BITS = (np.arange(40 * 60).reshape(40, 60) % 4096).astype(np.uint16)
TURNS = {
    3: Image.Transpose.ROTATE_180,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def of_kind(kind, mode="RGB", tolerance=0, orientation=None, **options):
    """A file and its pixels; stored as a camera does that is held at an orientation of EXIF."""
    image = COLORS.convert(mode)
    expected = image.convert("L" if mode in ("L", "LA") else "RGB")
    if orientation is not None:
        exif = options["exif"] = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        image = image.transpose(TURNS[orientation])
    return encoded(image, kind, **options), np.asarray(expected), tolerance


def of_16_bits(image, kind=None):
    content = encoded(Image.fromarray(image), kind) if kind else tf.io.encode_png(image).numpy()
    return content, image / 257, 1e-4


IMAGES = {
    **{f"PNG {mode}": partial(of_kind, "PNG", mode) for mode in ("L", "LA", "RGB", "RGBA", "P")},
    "PNG, turned": partial(of_kind, "PNG", orientation=6),
    "PNG of 16 bits": lambda: of_16_bits(TWELVE_BITS[..., np.newaxis]),
    "PNG of 16 bits in color": lambda: of_16_bits(np.stack([TWELVE_BITS] * 3, 2)),
    **{f"JPEG {mode}": partial(of_kind, "JPEG", mode, 9, quality=95) for mode in ("L", "RGB")},
    "JPEG in CMYK": partial(of_kind, "JPEG", "CMYK", 16, quality=95),
    **{f"JPEG, turned {n}": partial(of_kind, "JPEG", "RGB", 9, n, quality=95) for n in TURNS},
    "GIF": partial(of_kind, "GIF", "P"),
    **{f"BMP {mode}": partial(of_kind, "BMP", mode) for mode in ("L", "RGB", "P")},
    "WebP with damaged EXIF": partial(of_kind, "WEBP", lossless=True, exif=b"Exif\0\0damaged"),
    "TIFF, turned": partial(of_kind, "TIFF", orientation=6),
    "TIFF of 16 bits": lambda: of_16_bits(TWELVE_BITS, "TIFF"),
    "PPM": partial(of_kind, "PPM"),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_an_image_is_decoded_upright_in_its_colors_and_all_its_bits(kind, tmp_path):
    content, expected, tolerance = IMAGES[kind]()
    path = tmp_path / "image"
    path.write_bytes(content)
    shape = image_shape(path)
    assert shape == (40, 60, 1 if expected.size == 40 * 60 else 3)
    pixels = decode(path, shape)
    np.testing.assert_allclose(pixels * 255, expected.reshape(shape), rtol=0, atol=tolerance + 1e-4)
    other = (*shape[:2], 4 - shape[2])  # gray from colors, colors from gray
    assert decode(path, other).shape == other


FLOATS = Image.fromarray(np.ones((3, 4), np.float32))


@pytest.mark.parametrize(
    "content, message",
    [
        (lambda: b"", "no image that TensorFlow or Pillow knows"),
        (lambda: b"no image", "no image that TensorFlow or Pillow knows"),
        (lambda: b"\x89PNG\r\n\x1a\n" + bytes(30), ""),
        (lambda: b"\xff\xd8\xff\xe0" + bytes(50), ""),
        (lambda: b"\xff\xd8\xff\xe0\0\1", ""),
        (lambda: encoded(COLORS, "PNG")[:-50], ""),
        (lambda: encoded(COLORS, "JPEG")[:-500], ""),
        (lambda: encoded(COLORS, "GIF")[:-500], ""),
        (lambda: encoded(COLORS, "BMP")[:-50], ""),
        (lambda: encoded(FLOATS, "TIFF"), "32-bit numbers without a known range"),
    ],
)
def test_what_is_no_whole_image_is_an_error_with_its_name(content, message, tmp_path):
    (tmp_path / "x.png").write_bytes(content())
    files = ImageFiles(tmp_path, ["x.png"], np.zeros(1, np.int32), (3, 4, 3))
    told = loading.refusal(files.decoded)
    assert told.startswith(f"{tmp_path / 'x.png'} cannot be decoded: ") and message in told
    assert not any(text in told for text in ("{{", "["))
