"""Images that are decoded while training runs: the same as in memory, from any step; and faults."""

import io
import json
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import ExifTags, Image

import towers
from tests import loading
from towers.app.config import TrainConfig
from towers.resume.epoch import Epoch
from towers.app.datasets import batches as input_lib, dataset
from towers.app.datasets.image_folder import ImageFiles, decode, image_shape

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
def test_the_first_image_that_cannot_be_decoded_is_named_in_its_turn(folder):
    train, _ = load_examples(folder)
    whole = bits(train.batches(Epoch(BATCH, 0, 0)))
    second, first = (path_of(train, order(0)[place]) for place in (14, 12))
    second.unlink()
    damage(first)
    batches = iter(train.batches(Epoch(BATCH, seed=0, number=0, start_step=1)))
    assert bits([next(batches)]) == [whole[1]]
    assert loading.refusal(next, batches).startswith(f"{first} cannot be decoded: ")


def config(folder, run_dir):
    """5 steps an epoch: 23 = 4 x 5 + 3."""
    return loading.config(run_dir, "image_folder", data_dir=str(folder))


@pytest.mark.matrix
@pytest.mark.usefixtures("_streamed")
def test_a_run_that_an_image_has_ended_goes_on_to_the_same_bits(folder, tmp_path, capsys):
    """An image fails from the second epoch's third step on."""
    undisturbed = towers.train(config(folder, tmp_path / "once"))
    train, _ = load_examples(folder)
    path = path_of(train, order(1)[2 * BATCH])
    content = []

    class Damage(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            content.append(damage(path))

    with pytest.raises(ValueError, match=f"{path} cannot be decoded"):
        towers.train(config(folder, tmp_path / "run"), [Damage()])
    assert "saved at step 7. Resume: " in capsys.readouterr().out
    path.write_bytes(content[0])
    again = TrainConfig(resume=str(tmp_path / "run"), trust_run_dir=True)
    assert towers.train(again) == undisturbed
    assert loading.final_weights(tmp_path / "run") == loading.final_weights(tmp_path / "once")


def test_a_run_says_and_records_the_size_of_its_images(folder, tmp_path, capsys):
    run_dir = tmp_path / "run"
    towers.train(loading.config(run_dir, "image_folder", data_dir=str(folder), epochs=0))
    said = capsys.readouterr().out
    assert "\n          images of 6x7x3 (height x width x channels)\n" in said
    assert "Warning   5 of 23 training images do not have the most frequent size" in said
    values = json.loads((run_dir / "config.json").read_text())
    assert values["image_size"] == "6x7x3"


# Files of all kinds: what a header says is what is decoded, upright and in its colors
ROWS, COLUMNS = np.mgrid[:40, :60]  # pixels that JPEG keeps
COLORS = Image.fromarray(np.stack([ROWS * 6, COLUMNS * 4, 255 - ROWS * 6], 2).astype(np.uint8))
TWELVE_BITS = (COLUMNS + 60 * ROWS).astype(np.uint16)


def encoded(kind, mode="RGB", is_turned=False, **options):
    """A file and its pixels; it may be stored as by a camera that is held upright."""
    image = COLORS.convert(mode)
    expected = image.convert("L" if mode == "LA" else "RGB")
    if is_turned:
        options["exif"] = Image.Exif()
        options["exif"][ExifTags.Base.Orientation] = 6
        image = image.transpose(Image.Transpose.ROTATE_90)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue(), np.asarray(expected)


def of_16_bits():
    return tf.io.encode_png(TWELVE_BITS[..., np.newaxis]).numpy(), TWELVE_BITS / 257


@pytest.mark.parametrize(
    "make, tolerance",
    [
        (of_16_bits, 0),
        (partial(encoded, "PNG", "LA"), 0),
        (partial(encoded, "PNG", is_turned=True), 0),
        (partial(encoded, "JPEG", is_turned=True, quality=95), 9),
        (partial(encoded, "TIFF", is_turned=True), 0),
        (partial(encoded, "GIF", "P"), 0),
        (partial(encoded, "WEBP", lossless=True, exif=b"Exif\0\0damaged"), 0),
    ],
)
def test_an_image_is_decoded_upright_in_its_colors_and_all_its_bits(make, tolerance, tmp_path):
    content, expected = make()
    path = tmp_path / "image"
    path.write_bytes(content)
    shape = image_shape(path)
    assert shape == (40, 60, 1 if expected.size == 40 * 60 else 3)
    pixels = decode(path, shape)
    np.testing.assert_allclose(pixels * 255, expected.reshape(shape), rtol=0, atol=tolerance + 1e-4)
    other = (20, 30, 4 - shape[2])  # gray from colors, colors from gray
    assert decode(path, other).shape == other


@pytest.mark.parametrize("kind", ["PNG", "TIFF in float32", ""])
def test_what_is_no_whole_image_is_an_error_with_its_name(kind, tmp_path):
    path, content, message = tmp_path / "x.png", b"no image", "no image that Pillow knows"
    if kind == "TIFF in float32":
        content, _ = encoded("TIFF", "F")
        message = "32-bit numbers without a known range"
    elif kind:
        content, message = encoded(kind)[0][:-500], ""
    path.write_bytes(content)
    files = ImageFiles(tmp_path, ["x.png"], np.zeros(1, np.int32), (3, 4, 3))
    told = loading.refusal(files.decoded)
    assert told.startswith(f"{path} cannot be decoded: ") and message in told
