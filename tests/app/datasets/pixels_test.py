"""uint8 images of x are divided by 255, whatever they come in; a line says so."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.app.datasets.sources import Rows
from towers.app.config import TrainConfig
from towers.app.training.build import build
from towers.app.training.task import UserObjects
from towers.resume.epoch import Epoch
from towers.app.datasets import batches, pixels, tf_data
from towers.app.datasets.npz import load as load_npz
from towers.app.datasets.user import from_splits

COUNT = 6
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 4, 5)).astype("uint8")
LABELS = (np.arange(COUNT) % 3).astype("int32")
DIVIDED = IMAGES / np.float32(255)
SAID = "x: uint8 images, divided by 255; give floats to have them as they are"


CONTAINERS = {
    "arrays": lambda x: (x, LABELS),
    "tf.data": lambda x: tf.data.Dataset.from_tensor_slices((x, LABELS)),
    "source": lambda x: Rows(list(zip(x, LABELS, strict=True))),
    "npz": None,
}


def dataset_of(container, x, directory=None, custom_loss=False):
    if container == "npz":
        path = directory / "data.npz"
        np.savez(path, x_train=x, y_train=LABELS, x_test=x, y_test=LABELS)
        return load_npz(str(path), custom_loss)
    split, num_classes = CONTAINERS[container](x), None if custom_loss else 3
    return from_splits("mine", split, split, custom_loss=custom_loss, num_classes=num_classes)


def taken(split, restored=()):
    """All x of a split, as a step gets them, in order and with their dtype."""
    options = TrainConfig(shuffle_buffer=1)
    examples = batches.load_examples(split, options, restored)
    ((x, _),) = examples.batches(Epoch(COUNT))
    return x.numpy()


@pytest.mark.parametrize(
    "container, custom_loss",
    [("arrays", False), ("arrays", True), ("tf.data", False), ("source", False), ("npz", False)],
)
def test_uint8_images_alone_are_divided_in_every_container_for_every_task_and_that_is_said(
    container, custom_loss, tmp_path
):
    flat, floats = IMAGES.reshape(COUNT, -1), IMAGES.astype("float32")
    for x, expected, notes in ((IMAGES, DIVIDED, [SAID]), (flat, flat, []), (floats, floats, [])):
        dataset = dataset_of(container, x, tmp_path, custom_loss)
        np.testing.assert_array_equal(taken(dataset.train), expected)
        if notes:
            np.testing.assert_array_equal(taken(dataset.test), expected)
        assert dataset.notes == notes


def test_streamed_examples_are_divided_after_they_are_shuffled(monkeypatch):
    monkeypatch.setattr(tf_data, "fits", lambda num_bytes: num_bytes < 2 * (4 * 5 + 4))
    examples = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS))
    np.testing.assert_array_equal(taken(examples), DIVIDED)


@pytest.mark.parametrize(
    "container, custom_loss", [("arrays", False), ("tf.data", True), ("source", False)]
)
def test_one_split_of_uint8_images_beside_one_of_floats_is_refused(container, custom_loss):
    splits = [CONTAINERS[container](x) for x in (IMAGES, IMAGES.astype("float32"))]
    for train, test in (splits, splits[::-1]):
        with pytest.raises(ValueError, match="^x: uint8 images in (train|test) alone .* in both"):
            from_splits("mine", train, test, custom_loss=custom_loss, num_classes=3)


def test_of_a_structure_the_images_of_x_alone_are_divided_and_named():
    tokens = tf.ragged.constant([[1, 2], [3], [], [4], [5], [6]], dtype=tf.uint8)
    split = ({"t": tokens, "i": IMAGES}, IMAGES, LABELS)
    dataset = from_splits("mine", split, None, custom_loss=True)
    x, y, weight = dataset.train
    assert x["t"].dtype == tf.uint8 and y.dtype == np.uint8 and weight.dtype == np.int32
    np.testing.assert_array_equal(x["i"], DIVIDED)
    assert dataset.notes == [SAID.replace("x:", "x['i']:")]


def test_uint8_of_an_unknown_rank_is_refused():
    unknown = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).map(
        lambda x, y: (tf.numpy_function(lambda image: image, [x], tf.uint8), y)
    )
    with pytest.raises(ValueError, match="x: uint8 of an unknown rank .* tf.ensure_shape"):
        from_splits("mine", unknown, None, custom_loss=True)


def image_model(*first):
    return keras.Sequential([keras.Input((4, 5)), *first, keras.layers.Flatten()])


def rescaling_model():
    return image_model(keras.layers.Rescaling(1 / 255))


def on_inputs(function):
    x = keras.Input((4, 5))
    return keras.Model(x, keras.layers.Flatten()(function(x)))


def adapted(pixels):
    layer = keras.layers.Normalization()
    layer.adapt(pixels)
    return image_model(layer)


@pytest.mark.parametrize(
    "make, scales",
    [
        (rescaling_model, True),
        (lambda: image_model(image_model(keras.layers.Rescaling(1 / 127.5, offset=-1))), True),
        (lambda: adapted(IMAGES.astype("float32")), True),
        (lambda: on_inputs(lambda x: x / 255.0), True),
        (lambda: on_inputs(lambda x: 2 * ((x - 127.5) / 64)), True),
        (lambda: image_model(), False),
        (lambda: adapted(DIVIDED), False),
        (lambda: on_inputs(lambda x: keras.layers.Dense(5)(x) * 127.5 + 127.5), False),
    ],
)
def test_a_model_that_scales_images_gets_0_to_255_exactly(make, scales):
    scaled = pixels.scale_for_model(dataset_of("arrays", IMAGES), make())
    found = taken(scaled.test, scaled.restored)
    np.testing.assert_array_equal(found, IMAGES if scales else DIVIDED)
    assert ("scales them" in scaled.notes[-1]) is scales
    assert (SAID in scaled.notes) is not scales


@pytest.mark.parametrize("container", ["tf.data", "source"])
def test_images_of_every_container_are_restored_for_such_a_model(container):
    scaled = pixels.scale_for_model(dataset_of(container, IMAGES), rescaling_model())
    np.testing.assert_array_equal(taken(scaled.test, scaled.restored), IMAGES)


@pytest.mark.parametrize(
    "split",
    [
        lambda: ({"b": LABELS, "a": IMAGES}, LABELS),
        lambda: tf.data.Dataset.from_tensor_slices({"a": IMAGES, "b": LABELS}),
    ],
    ids=["dict", "x of tf.data"],
)
def test_images_among_several_inputs_are_restored_alone(split):
    split = split()
    dataset = from_splits("mine", split, None, custom_loss=True)
    assert dataset.divided == [True, False]
    examples = batches.load_examples(dataset.train, restored=[True, False])
    (found,) = examples.batches(Epoch(9))
    x, *_ = keras.utils.unpack_x_y_sample_weight(found)
    image, other = tf.nest.flatten(x)
    np.testing.assert_array_equal(image, IMAGES)
    np.testing.assert_array_equal(other, LABELS)
    assert tf.nest.map_structure(len, x) == tf.nest.map_structure(
        lambda spec: COUNT,
        keras.utils.unpack_x_y_sample_weight(
            split.element_spec if isinstance(split, tf.data.Dataset) else split
        )[0],
    )


def test_a_run_of_a_model_that_scales_images_is_that_of_the_bytes_as_floats():
    given, found = TrainConfig(num_gpus=1, augment="crop_flip"), []
    for x in IMAGES[..., None], IMAGES[..., None].astype("float32"):
        made = keras.Sequential(
            [
                keras.Input((4, 5, 1)),
                keras.layers.Rescaling(1 / 255),
                keras.layers.Flatten(),
                keras.layers.Dense(3, "softmax"),
            ]
        )
        objects = UserObjects(made, (x, LABELS), (x, LABELS))
        run = build(objects.named_in(given), objects)
        assert any(
            "images: 0 to 255 as they are, for 'rescaling" in note for note in run.notes
        ) is (x.dtype == "uint8"), run.notes
        found.append([run.train.batches(Epoch(4, 1, 2)), run.test.batches(Epoch(4))])
    for ours, theirs in zip(*found, strict=True):
        for (x, y), (expected, labels) in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(x, expected, rtol=1e-6)
            np.testing.assert_array_equal(y, labels)


def model():
    made = keras.Sequential(
        [
            keras.Input((4, 5)),
            keras.layers.Flatten(),
            keras.layers.Dense(3, "softmax"),
        ]
    )
    made.compile("sgd", "sparse_categorical_crossentropy")
    return made


def splits():
    return (IMAGES, LABELS), (IMAGES, LABELS)
