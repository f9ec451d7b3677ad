"""A test for each private part of Keras that towers uses."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from towers.machine import keras_internals

L = keras.layers


def test_all_layers():
    inner = keras.Sequential([keras.Input((3,)), L.Dense(4, name="deep")])
    model = keras.Sequential([
        keras.Input((5, 3)), L.TimeDistributed(inner, name="each"),
        L.Bidirectional(L.GRU(2, name="gru"), name="both"),
    ], name="model")
    layers = keras_internals.all_layers(model)
    assert layers[0] is model
    names = {layer.name for layer in layers}
    assert {"each", "deep", "both", "forward_gru", "backward_gru"} <= names
    assert sum(isinstance(layer, L.GRUCell) for layer in layers) == 2
    assert len(layers) == len(set(map(id, layers)))


def test_calls_in_order():
    inner = keras.Sequential([keras.Input((3,)), L.Dense(3, name="deep"), L.ReLU(name="relu")])
    shared = L.Dense(3, name="shared")
    x = keras.Input((3,))
    model = keras.Model(x, L.Add(name="sum")([shared(inner(shared(x))), x]))
    calls = keras_internals.calls_in_order(model)
    assert [c.operation.name for c in calls] == ["shared", "deep", "relu", "shared", "sum"]
    assert [v.shape for v in calls[0].outputs] == [(None, 3)]
    assert keras_internals.calls_in_order(inner)[0].operation is inner.layers[0]

    class Own(keras.Sequential):
        def call(self, x):
            return x

    for other in (Own([keras.Input((3,))]), keras.Sequential([L.Dense(3)])):
        assert keras_internals.calls_in_order(other) is None


def test_calls_wrapped():
    layer = L.Dense(3)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.ReLU(), layer])
    called = []

    def scope(operation, index):
        called.append((operation, index))
        return contextlib.nullcontext()

    with keras_internals.calls_wrapped([layer], scope):
        model(np.ones([2, 3]))
    model(np.ones([2, 3]))
    assert called == [(layer, 0), (layer, 1)]


def test_give_seed_generator():
    dropout = L.Dropout(0.0)
    model = keras.Sequential([keras.Input((1000,)), dropout])
    assert not model.variables
    keras_internals.give_seed_generator(dropout, 7)
    assert [v is dropout.seed_generator.state for v in model.variables] == [True]
    dropout.rate = 0.5
    assert 400 < np.count_nonzero(model(np.ones([1, 1000]), training=True)) < 600


def test_noise_left_out():
    random, layer, seed = keras.random, L.Dropout(0.5), keras.random.SeedGenerator(1)
    draws = [
        lambda: layer(np.ones((9, 9), np.float32), training=True),
        lambda: random.normal((9, 9), 1.0, seed=seed),
        lambda: random.truncated_normal((9, 9), seed=seed),
        lambda: random.uniform((9, 9), 1.0, 3.0, seed=seed),
        lambda: random.randint((9, 9), 1, 9, seed=seed),
        lambda: random.gamma((9, 9), 2.0, seed=seed),
        lambda: random.beta((9, 9), 2.0, 2.0, seed=seed),
        lambda: random.binomial((9, 9), 8.0, 0.5, seed=seed),
        lambda: random.categorical(np.ones((9, 9), np.float32), 9, seed=seed),
        lambda: random.shuffle(np.arange(99), seed=seed),
    ]
    for draw in draws:
        assert (draw().numpy() != draw().numpy()).any()
    with keras_internals.noise_left_out():
        state = seed.state.numpy()
        for draw in draws:
            np.testing.assert_array_equal(draw(), draw())
        np.testing.assert_array_equal(seed.state, state)
    assert (draws[0]().numpy() != draws[0]().numpy()).any()


def test_moments_replaced():
    layer = L.BatchNormalization(epsilon=0.0, momentum=0.0)
    layer.build((None, 2))
    x, asked = tf.constant([[3.0, 5.0], [4.0, 8.0]]), []

    def moments(inputs, mask):
        asked.append((inputs.shape, mask))
        return tf.constant([1.0, 2.0]), tf.constant([4.0, 9.0])

    with keras_internals.moments_replaced(layer, moments):
        y = layer(x, training=True)
    np.testing.assert_allclose(y, [[1.0, 1.0], [1.5, 2.0]])
    np.testing.assert_allclose(layer.moving_variance, [4.0, 9.0])
    layer(x, training=True)  # Keras' own again
    np.testing.assert_allclose(layer.moving_mean, [3.5, 6.5])
    assert asked == [((2, 2), None)]


def test_stored_value():
    variable = keras.Variable([1.0, 2.0])
    with keras.StatelessScope([(variable, tf.constant([3.0, 4.0]))]):
        assert isinstance(keras_internals.stored_value(variable), tf.Variable)
        np.testing.assert_array_equal(keras_internals.stored_value(variable), [1.0, 2.0])
        late = keras.Variable("zeros", shape=(2,))
        assert keras_internals.stored_value(late) is None


def test_stored_in():
    optimizer, other = keras.optimizers.SGD(), tf.Variable(5, dtype="int64")
    parameter = keras.Variable([1.0])
    optimizer.build([parameter])
    with keras_internals.stored_in([optimizer.iterations], [other]):
        optimizer.apply([tf.constant([1.0])], [parameter])
        assert int(optimizer.iterations) == 6
    assert int(other) == 6 and int(optimizer.iterations) == 0


def test_optimized_variables():
    variables, adam = [keras.Variable([1.0]), keras.Variable([2.0])], keras.optimizers.Adam
    for optimizer in (adam(), keras.optimizers.LossScaleOptimizer(adam())):
        optimizer.build(variables)
        found = keras_internals.optimized_variables(optimizer)
        assert [v is w for v, w in zip(found, variables, strict=True)] == [True, True]


def test_surroundings():
    around, seen = [], []

    class Inner(keras.layers.Layer):
        def call(self, x, training=None):
            seen.append((training, x.dtype.name))
            return x

    inner = Inner(dtype="mixed_float16")

    class Outer(keras.layers.Layer):
        def call(self, x, training=None):
            around.append(keras_internals.surroundings())
            return inner(x)

    Outer(dtype="mixed_float16")(tf.ones([2, 3]), training=True)
    with around[0]():
        inner(tf.ones([2, 3]))
    inner(tf.ones([2, 3]))
    assert [training for training, _ in seen] == [True, True, None]
