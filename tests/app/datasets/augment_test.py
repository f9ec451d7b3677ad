"""Augmentation draws from (seed, epoch, index) alone: the same bits however an example is met."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.app.datasets.sources import NUM_CLASSES, Pixels
from tests.loading import in_each_form, refusal
from towers.resume.epoch import Epoch
from towers.app.datasets import augment as augment_lib
from towers.app.datasets import batches as input_lib
from towers.app.datasets import tf_data
from towers.app.config import TrainConfig

COUNT, SHAPE = 19, (6, 5, 3)
ME = "tests.app.datasets.augment_test"
SPEC = tf.TensorSpec((None, *SHAPE))


def shift(x, seed):
    return x + tf.random.stateless_uniform([], seed)


def layers():
    return keras.Sequential(
        [keras.layers.RandomFlip("horizontal"), keras.layers.RandomErasing(value_range=(0, 1))]
    )


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    return in_each_form(Pixels(COUNT, SHAPE), NUM_CLASSES, tmp_path_factory.mktemp("images"))


def by_example(split, batch_size=4, epoch=1, start_step=0, seed=3, name="crop_flip", **options):
    """{the example's pixels before: after}, of the steps left; by the order without it."""
    found = {}
    plain, changed = (
        input_lib.load_examples(split, TrainConfig(**options), augment=augment).batches(
            Epoch(batch_size, seed, epoch, start_step)
        )
        for augment in (None, name)
    )
    for (before, y), (after, y_after) in zip(plain, changed, strict=True):
        np.testing.assert_array_equal(y, y_after)
        assert after.dtype == tf.float32 and after.shape == before.shape
        found |= {b.tobytes(): a.tobytes() for b, a in zip(before.numpy(), after.numpy())}
    return found


def test_an_example_is_the_same_in_any_form_of_data_any_batch_and_from_any_step(
    splits, monkeypatch
):
    expected = by_example(splits["arrays"])
    assert len(expected) == COUNT and any(a != b for a, b in expected.items())
    assert by_example(splits["arrays"], batch_size=7) == expected
    assert by_example(splits["image files"]) == expected
    assert by_example(splits["a source"]) == expected
    assert by_example(splits["tf.data"]) == expected  # cached
    monkeypatch.setattr(tf_data, "fits", lambda size: size < 4000)
    assert by_example(splits["tf.data"], shuffle_buffer=3) == expected  # streamed
    for form in "a source", "tf.data":
        rest = by_example(splits[form], start_step=2, shuffle_buffer=3)
        assert len(rest) == COUNT - 8 and rest.items() <= expected.items()


def test_another_seed_or_epoch_gives_other_examples_and_each_example_its_own(splits):
    first = by_example(splits["arrays"], name=f"{ME}:shift")
    assert by_example(splits["arrays"], name=f"{ME}:shift", epoch=2) != first
    assert by_example(splits["arrays"], name=f"{ME}:shift", seed=4) != first
    amounts = {
        np.frombuffer(after, np.float32)[0] - np.frombuffer(before, np.float32)[0]
        for before, after in first.items()
    }
    assert len(amounts) == COUNT
    examples = input_lib.load_examples(splits["arrays"], augment="crop_flip")
    ((x, _),) = examples.batches(Epoch(COUNT))  # evaluation
    np.testing.assert_array_equal(x, splits["arrays"][0])


def seeds(count):
    return [augment_lib.example_seed(5, tf.constant(index)) for index in range(count)]


def test_a_small_image_is_padded_cropped_at_each_offset_and_mirrored():
    x = np.arange(1, 1 + np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    padded = np.pad(x, ((4, 4), (4, 4), (0, 0)))
    crops = {}
    for down in range(9):
        for right in range(9):
            crop = padded[down : down + 6, right : right + 5]
            crops[crop.tobytes()] = crops[crop[:, ::-1].tobytes()] = (down, right)
    crop_flip = augment_lib.load("crop_flip", SPEC)
    found = [crops[crop_flip(x, seed).numpy().tobytes()] for seed in seeds(120)]
    assert {down for down, _ in found} == {right for _, right in found} == set(range(9))


def test_of_a_large_image_a_part_is_resized_to_its_size():
    ramp = tf.linspace(0.0, 1.0, 80)
    x = tf.stack([tf.repeat(ramp[tf.newaxis], 70, 0), tf.repeat(ramp[:70, tf.newaxis], 80, 1)], 2)
    crop_flip = augment_lib.load("crop_flip", tf.TensorSpec((None, 70, 80, 2)))
    widths = [
        float(tf.reduce_max(y) - tf.reduce_min(y))
        for y in (crop_flip(x, seed)[..., 0] for seed in seeds(20))
    ]
    assert min(widths) < 0.5 < max(widths) <= 1.0  # of 8% to all of the area
    left = [float(y[0, -1, 0] - y[0, 0, 0]) for y in (crop_flip(x, seed) for seed in seeds(20))]
    assert min(left) < 0 < max(left)


def stateful(x, seed):
    return x + tf.random.uniform([])


def smaller(x, seed):
    return x[1:]


def dense():
    return keras.layers.Dense(3)


def norm():
    return keras.layers.BatchNormalization(center=False, scale=False)


@pytest.mark.parametrize(
    "name, message",
    [
        ("crop", "augment ('crop') must be crop_flip or package.module:function. For layers of"),
        (f"{ME}:stateful", "uses RandomUniform, which does not draw from the example's seed"),
        (f"{ME}:smaller", "makes float32 (5, 5, 3) of float32 (6, 5, 3)"),
        (f"{ME}:dense", "has weights to train, which nothing would train"),
        (f"{ME}:norm", "changes from call to call"),
        (f"{ME}:by_example", "must be a function (x, seed) -> x"),
    ],
)
def test_a_function_that_cannot_augment_or_repeat_is_an_error_of_one_line(name, message):
    assert message in refusal(augment_lib.load, name, SPEC)


def test_layers_draw_only_from_the_seed_of_an_example():
    x = tf.random.stateless_uniform(SHAPE, [1, 2])
    found = []
    for _ in range(2):
        change = augment_lib.load(f"{ME}:layers", SPEC)
        found.append([change(x, seed).numpy() for seed in seeds(8)])
    np.testing.assert_array_equal(*found)
    assert len({image.tobytes() for image in found[0]}) > 2
