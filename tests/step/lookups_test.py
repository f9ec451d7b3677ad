"""Tables of which all towers look up the same rows: Keras' optimizers square each lookup apart."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.custom_step.steps import fit_alike, step_of

L = keras.layers
DISTINCT = ["unique", "sum", "mean"]


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


class CustomStep(keras.Sequential):
    train_step = step_of(lambda model, x, y: model.compute_loss(x, y, model(x, training=True)))


@pytest.mark.telling("two tables-*", "unique-*", "mean-False")
@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize("kind", ["two tables", "one table", "twice", *DISTINCT])
def test_what_all_towers_look_up_is_one_lookup_as_it_is_in_the_large_batch(kind, own_step, float64):
    def make():
        layer = (Distinct if kind in DISTINCT else Positions)(kind)
        layers = [keras.Input((5,), dtype="int32"), layer, L.Flatten(), L.Dense(2)]
        model = (CustomStep if own_step else keras.Sequential)(layers)
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.3)
        model.compile(optimizer, "mse", jit_compile=False)
        return model

    rng = np.random.default_rng(0)
    rows = rng.integers(0, 9, (22, 5)), rng.normal(size=(22, 2))
    fit_alike(make, *rows, num_towers=3, batch_size=8, epochs=2)
