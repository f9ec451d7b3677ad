"""What a tf.data.Dataset draws anew for each iterator, as the operations in it tell."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from towers.resume.dataset_draws import examine


def whole(seed=1, **options):
    return tf.data.Dataset.range(9).shuffle(3, seed=seed, **options)


def by_python(dataset):
    return dataset.map(lambda v: tf.numpy_function(lambda a: a, [v], tf.int64))


def noisy(dataset):
    generator = tf.random.Generator.from_seed(1)
    return dataset.map(lambda v: generator.normal([]))


def inner_order(dataset):
    return dataset.flat_map(lambda v: tf.data.Dataset.range(4).shuffle(4, seed=2))


CASES = {  # (whether each iterator is like the first, whether only their number matters)
    "in order": (lambda: tf.data.Dataset.range(9).batch(2).cache().repeat(2), True, True),
    "in one order": (lambda: whole(reshuffle_each_iteration=False).repeat(2), True, True),
    "shuffled": (lambda: whole().map(tf.abs, 2).batch(2).prefetch(1), False, True),
    "shuffled, then repeated": (lambda: whole().repeat(2), False, False),
    "repeated, then shuffled": (
        lambda: tf.data.Dataset.range(9).repeat(2).shuffle(3, 1),
        False,
        True,
    ),
    "one after another": (lambda: tf.data.Dataset.range(9).concatenate(whole()), False, False),
    "chosen": (
        lambda: tf.data.Dataset.sample_from_datasets([whole(), whole()], seed=1),
        False,
        False,
    ),
    "shuffled within": (lambda: inner_order(tf.data.Dataset.range(3)), False, False),
    "by Python": (lambda: by_python(tf.data.Dataset.range(3)), False, False),
    "with noise": (lambda: noisy(tf.data.Dataset.range(3)), False, True),
}


@pytest.mark.parametrize("name", CASES)
def test_what_an_iterator_depends_on_follows_from_the_operations(name):
    make, is_plain, is_known = CASES[name]  # made in the test: pytest's worker starts no TensorFlow
    draws = examine(make(), "x")
    assert (draws.is_plain, draws.is_known) == (is_plain, is_known)
    assert bool(draws.variables) == ("noise" in name)


@pytest.mark.parametrize("name", [name for name, (_, is_plain, _) in CASES.items() if is_plain])
def test_iterators_are_alike_if_they_are_said_to_be(name):
    dataset = CASES[name][0]()
    first, second = [[np.ravel(v).tolist() for v in dataset] for _ in range(2)]
    assert first == second


def test_a_shuffle_without_a_seed_is_an_error_that_names_its_argument(without_seed):
    for dataset in (whole(None), whole(None, reshuffle_each_iteration=False).batch(2).repeat()):
        with pytest.raises(ValueError, match=r"^validation_data: a `shuffle`.*seed=1") as caught:
            examine(dataset, "validation_data")
        assert "\n" not in str(caught.value)
    tf.random.set_seed(1)
    assert len(examine(whole(None), "x").seeds) == 1


def test_noise_without_a_seed_is_warned_of(without_seed):
    def noise():
        return tf.data.Dataset.range(3).map(lambda v: tf.random.uniform([]))

    with pytest.warns(UserWarning, match="^x: a function of this tf.data.Dataset draws random"):
        examine(noise(), "x")
    tf.random.set_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        examine(noise(), "x")
