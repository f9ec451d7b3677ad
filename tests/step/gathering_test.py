"""What towers do together: `towers.gather`, BatchNormalization, lookups of the same rows."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.custom_step.steps import fit_alike, step_of
from tests.parallel.pairs import assert_close
from towers.machine import devices
from towers.step import TowerStep
from towers.step.gathering import gathered_by

L = keras.layers
DISTINCT = ["unique", "sum", "mean"]


def test_outside_of_towers_it_is_its_argument():
    rows = tf.ones([3, 2])
    assert towers.gather(rows) is rows


def test_within_it_is_what_was_asked_for_and_in_this_thread_alone():
    elsewhere = []
    with gathered_by(lambda rows: rows + 1.0):
        assert float(towers.gather(tf.zeros([1]))[0]) == 1.0
        thread = threading.Thread(target=lambda: elsewhere.append(towers.gather(2.0)))
        thread.start()
        thread.join()
    assert towers.gather(3.0) == 3.0 and elsewhere == [2.0]


def test_a_tower_step_refuses_it_and_names_the_way_out():
    """It would otherwise hand a shard's own rows back, and be silently wrong."""
    def loss(y, y_pred):
        return tf.reduce_mean((towers.gather(y_pred) - towers.gather(y)) ** 2)

    model = keras.Sequential([keras.Input((3,)), L.Dense(2)])
    with pytest.raises(ValueError, match="towers.make_parallel"):
        TowerStep(model, "sgd", loss, num_towers=2)(tf.ones([4, 3]), tf.ones([4, 2]))


def small():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), L.Dense(5), L.BatchNormalization(), L.Dense(3)])


def small_batch(size):
    rng = np.random.default_rng(size)
    return rng.normal(3.0, 2.0, (size, 4)), rng.normal(size=(size, 3))


def masked():
    keras.utils.set_random_seed(1)
    x = keras.Input((7, 4))
    return keras.Model(x, L.Dense(3)(L.BatchNormalization()(L.Masking()(x))))


def masked_batch(size):
    rng = np.random.default_rng(size)
    x = rng.normal(size=(size, 7, 4))
    x[np.arange(7)[None, :] >= rng.integers(1, 8, size)[:, None]] = 0
    return x, rng.normal(size=(size, 7, 3))


def make_step(model, num_towers, num_devices=None, **options):
    names = devices.tower_devices(num_devices or num_towers, "cpu")
    return TowerStep(model, keras.optimizers.SGD(0.1), "mse", devices=names,
                     num_towers=num_towers, **options)


def test_masked_steps_do_not_count(float64):
    ours, keras_alone = masked(), masked()
    keras_alone.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    step = make_step(ours, 3, 2, batch_norm="synchronized")
    for size in (9, 2):
        x, y = masked_batch(size)
        step(x, y)
        keras_alone.train_on_batch(x, y)
    assert_close(ours.variables, keras_alone.variables)


def test_compiled_towers_meet_too(float64):
    """And leave the model as Keras made it."""
    ours, keras_alone = small(), small()
    make_step(ours, 2, batch_norm="synchronized", jit_compile=True)(*small_batch(6))
    keras_alone.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    keras_alone.train_on_batch(*small_batch(6))
    assert_close(ours.variables, keras_alone.variables)
    assert all("_moments" not in layer.__dict__ for layer in ours.layers)


@pytest.mark.telling("True")
@pytest.mark.parametrize("mask", [False, True])
def test_a_gradient_penalty_through_batch_normalization_is_keras_with_an_empty_shard(mask, float64):
    def penalty(model, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(model(x, training=True))
        return tf.reduce_mean(tape.gradient(total, x) ** 2)

    class Critic(keras.Sequential):
        train_step = step_of(penalty)

    def make():
        norm = [L.Masking()] * mask + [L.BatchNormalization(synchronized=True)]
        model = Critic([keras.Input((5, 4)), *norm, L.Dense(3, activation="tanh"), L.Dense(1)])
        model.compile("sgd", jit_compile=False)
        return model

    x = np.random.default_rng(0).normal(size=(6, 5, 4))
    x[:, 3:] = 0
    fit_alike(make, x, x, num_towers=3, batch_size=4)


# Tables of which all towers look up the same rows: Keras' optimizers square each lookup apart


class Positions(L.Layer):
    """Tokens, and what all rows of the batch look up alike."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.tokens = L.Embedding(9, 4)
        self.places = self.tokens if kind == "one table" else L.Embedding(9, 4)

    def call(self, x):
        twice = self.kind == "twice"
        return self.tokens(x) + self.places(
            tf.constant([0, 3, 3, 1, 0]) if twice else tf.range(tf.shape(x)[1]))


class Distinct(L.Layer):
    """Looks each token of the batch up once."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def build(self, shape):
        self.table = self.add_weight(shape=(10, 4))

    def call(self, x):
        table = tf.convert_to_tensor(self.table)
        if self.kind == "unique":
            tokens, places = tf.unique(tf.reshape(x, [-1]))
            rows = tf.gather(tf.gather(table, tokens), places)
            return tf.reshape(rows, [tf.shape(x)[0], 5 * 4])
        return tf.ensure_shape(tf.nn.safe_embedding_lookup_sparse(
            table, tf.sparse.from_dense(x), combiner=self.kind), [None, 4])


class CustomStep(keras.Model):
    train_step = step_of(lambda model, x, y: model.compute_loss(x, y, model(x, training=True)))


@pytest.mark.telling("two tables, mean-*")
@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize("kinds", ["two tables, mean", "one table", "twice", "unique, sum"])
def test_what_all_towers_look_up_is_one_lookup_as_it_is_in_the_large_batch(
    kinds, own_step, float64
):
    def make():
        x = keras.Input((5,), dtype="int32")
        found = [L.Flatten()((Distinct if kind in DISTINCT else Positions)(kind)(x))
                 for kind in kinds.split(", ")]
        rows = L.Concatenate()(found) if len(found) > 1 else found[0]
        model = (CustomStep if own_step else keras.Model)(x, L.Dense(2)(rows))
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.3)
        model.compile(optimizer, "mse", jit_compile=False)
        return model

    rng = np.random.default_rng(0)
    rows = rng.integers(0, 9, (22, 5)), rng.normal(size=(22, 2))
    fit_alike(make, *rows, num_towers=3, batch_size=8, epochs=2)
