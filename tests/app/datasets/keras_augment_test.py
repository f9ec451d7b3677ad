"""Keras' augmentation layers by name: the same bits wherever and whenever they run."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.app.datasets.augment_test import SHAPE, arrays, by_example
from tests.loading import refusal
from tests.resuming import outcome, resumed, train
from towers.app.datasets import augment as augment_lib
from towers.app.datasets import batches as input_lib
from towers.app.datasets.keras_augment import MIXING, NAMES
from towers.resume.source import InputOptions

CLASSES, COUNT = 4, 22
ME = "tests.app.datasets.keras_augment_test"
SPEC = tf.TensorSpec(SHAPE)
ALL_THREE = "RandomFlip('horizontal'),RandomTranslation(0.2,0.2),MixUp(alpha=0.8)"
ARGUMENTS = {
    "RandomCrop": "6,5", "RandomTranslation": "0.2,0.2", "RandomPosterization": "4",
    "RandomShear": "0.3,0.3",
}
PLAIN = ("AutoContrast", "ContrastLimitedAdaptiveHistogramEqualization", "Equalization",
         "RandAugment", "RandomElasticTransform", "Solarization")  # need no arguments


def layers():
    return keras.Sequential([
        keras.layers.RandomFlip("horizontal"), keras.layers.RandomTranslation(0.2, 0.2),
        keras.layers.RandomContrast(0.5, value_range=(0, 1)),
    ])


def one_hot_data():
    """Images whose channels are their label: what mixes them must mix labels as much."""
    y = np.eye(CLASSES, dtype=np.float32)[np.arange(COUNT) % CLASSES]
    x = np.tile(y[:, None, None], (1, 16, 16, 1))
    return (x, y), (x[:6], y[:6])


def compiled(input_shape=(16, 16, CLASSES), num_classes=None):
    model = keras.Sequential([
        keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dropout(0.25),
        keras.layers.Dense(CLASSES, activation="softmax"),
    ])
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    return model


def mixed(name, data, start_step=0, seed=3):
    """[(x, y)] of an epoch's batches: 8, 8 and 6 examples."""
    examples = input_lib.load_examples(data, InputOptions(augment=name))
    return list(input_lib.shuffled_batches(examples, 8, seed, epoch=1, start_step=start_step))


@pytest.mark.parametrize("name", [each for each in NAMES if each not in MIXING])
def test_every_layer_draws_from_the_examples_seed_alone(name):
    text = f"{name}({ARGUMENTS.get(name, '' if name in PLAIN else '0.4')})"
    function = augment_lib.load(text, SPEC)
    assert augment_lib.load_mix(text, SPEC, None, None) is None
    x, seed = tf.random.stateless_uniform(SHAPE, [1, 2]), tf.constant([3, 4])
    first = function(x, seed).numpy()
    np.testing.assert_array_equal(augment_lib.load(text, SPEC)(x, seed), first)
    assert first.dtype == np.float32 and first.min() >= -0.01 and first.max() <= 1.01


def test_layers_by_name_have_the_bits_of_the_same_layers_in_a_function():
    x, y = arrays()
    names = "RandomFlip('horizontal'),RandomTranslation(0.2,0.2),RandomContrast(factor=0.5)"
    found = by_example((x, y), name=names)
    assert found == by_example((x, y), name=f"{ME}:layers")
    assert any(a != b for a, b in found.items())


@pytest.mark.parametrize("name, tolerance", [("MixUp(alpha=0.8)", 1e-5), ("CutMix", 0.15)])
def test_labels_are_mixed_as_much_as_images(name, tolerance):
    batches = mixed(name, one_hot_data()[0])
    assert [len(labels) for _, labels in batches] == [8, 8, 6]
    shares = set()
    for images, labels in batches:
        assert images.dtype == labels.dtype == tf.float32
        np.testing.assert_allclose(tf.reduce_sum(labels, 1), 1, rtol=1e-6)
        # a box of CutMix covers whole pixels: up to one more or fewer on each of its sides
        np.testing.assert_allclose(tf.reduce_mean(images, (1, 2)), labels, atol=tolerance)
        shares |= {round(float(share), 3) for share in tf.reduce_max(labels, 1)}
    assert len(shares) > 5  # each example has its own


@pytest.mark.parametrize("name", MIXING)
def test_a_batch_is_mixed_the_same_whichever_step_the_epoch_goes_on_from(name):
    data, _ = one_hot_data()
    whole, rest = mixed(name, data), mixed(name, data, 1)
    for (x, y), (x_again, y_again) in zip(whole[1:], rest, strict=True):
        np.testing.assert_array_equal(x, x_again)
        np.testing.assert_array_equal(y, y_again)
    examples = input_lib.load_examples(data, InputOptions(augment=name))
    (x, y), = input_lib.ordered_batches(examples, COUNT)  # evaluation
    np.testing.assert_array_equal(x, data[0])
    others = mixed(name, data, seed=4)
    assert any((x != other).numpy().any() for (x, _), (other, _) in zip(whole[:2], others[:2]))


@pytest.mark.parametrize(("name", "message"), [
    ("RandAugmnt", "or package.module:function. Did you mean 'RandAugment'?"),
    ("RandomFlip,Dense", "augment ('Dense') must be one of crop_flip"),
    ("Resizing(3,3)", "must be one of crop_flip, AutoContrast"),
    ("RandomFlip(", "or layers of Keras by name, such as RandomFlip,RandomRotation(factor=0.1)"),
    ("RandomFlip(mode=open('x'))", "or layers of Keras by name, such as"),
    ("RandomRotation(1, angle=3)", "Keras makes no RandomRotation of that: ValueError: Unrec"),
    ("AugMix", "must be one of crop_flip, AutoContrast, "),
    ("RandomCrop(2,2)", "makes float32 (2, 2, 3) of float32 (6, 5, 3)"),
    ("MixUp,RandomFlip", "CutMix and MixUp mix the examples of a batch that all else has"),
])
def test_what_is_no_augmentation_is_one_line(name, message):
    told = refusal(augment_lib.load, name, SPEC)
    assert message in told and "\n" not in told


def test_mixing_refuses_classes_and_weights():
    (x, y), _ = one_hot_data()
    options = InputOptions(augment="RandomFlip,MixUp")
    for split in (x, y.argmax(1)), (x, y, np.ones(COUNT, np.float32)):
        told = refusal(input_lib.load_examples, split, options)
        assert "labels must be one-hot, without sample weights: give y as float32" in told
    config = towers.TrainConfig(augment="MixUp", class_weight="0:2", num_gpus=1)
    told = refusal(lambda: towers.train(config, model=compiled(), train=(x, y)))
    assert "needs one class an example, which `augment` does not mix" in told


def test_a_run_has_the_same_bits_on_1_2_and_8_devices(tmp_path):
    train_data, test_data = one_hot_data()
    values = []
    for num_gpus in (1, 2, 8):
        keras.utils.set_random_seed(1)
        model = compiled()
        config = towers.TrainConfig(
            augment=ALL_THREE, num_gpus=num_gpus, num_towers=8, batch_size=8, epochs=1,
            run_dir=str(tmp_path / str(num_gpus)),
        )
        history = towers.train(config, model=model, train=train_data, test=test_data)
        values.append([*(v.numpy().tobytes() for v in model.weights), str(history["loss"])])
    assert values[0] == values[1] == values[2]


@pytest.mark.matrix
def test_a_killed_and_resumed_run_has_the_bits_of_one_that_was_not(tmp_path):
    flags = (f"--model={ME}:compiled", f"--dataset={ME}:one_hot_data", f"--augment={ALL_THREE}",
             "--num_towers=4", "--batch_size=8", "--epochs=2", "--device=cpu", "--run_dir=run")
    (tmp_path / "whole").mkdir()
    code, _, stderr = train(*flags, "--num_gpus=4", cwd=tmp_path / "whole")
    assert code == 0, stderr
    code, _, stderr = train(*flags, "--num_gpus=1", "--checkpoint_every=2", cwd=tmp_path,
                            fault="step == 5 and kill('KILL')")
    assert code == -9, stderr
    assert resumed(tmp_path, "--num_gpus=2") == outcome(tmp_path / "whole/run")
