"""A test for each private part of Keras that towers uses."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from towers.machine import callback_internals, keras_internals, loss_internals

L = keras.layers


def test_all_layers():
    inner = keras.Sequential([keras.Input((3,)), L.Dense(4, name="deep")])
    model = keras.Sequential(
        [
            keras.Input((5, 3)),
            L.TimeDistributed(inner, name="each"),
            L.Bidirectional(L.GRU(2, name="gru"), name="both"),
        ],
        name="model",
    )
    layers = keras_internals.all_layers(model)
    assert layers[0] is model
    names = {layer.name for layer in layers}
    assert {"each", "deep", "both", "forward_gru", "backward_gru"} <= names
    assert sum(isinstance(layer, L.GRUCell) for layer in layers) == 2
    assert len(layers) == len(set(map(id, layers)))


def test_auto_jit_compile(monkeypatch):
    model = keras.Sequential([keras.Input((3,)), L.Dense(1)])
    for kind in ("CPU", "GPU"):
        devices = [tf.config.PhysicalDevice(f"/physical_device:{kind}:0", kind)]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_, found=devices: found)
        model.compile("sgd", "mse")
        assert keras_internals.auto_jit_compile(model) == model.jit_compile == (kind == "GPU")


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


def test_moments_of():
    x = np.arange(6.0, dtype="float32").reshape(3, 2)
    layer = keras.layers.BatchNormalization()
    layer.build(x.shape)
    mean, variance = keras_internals.moments_of(layer)(tf.constant(x), None)
    np.testing.assert_allclose(mean, x.mean(0))
    np.testing.assert_allclose(variance, x.var(0), 1e-6)


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


C = keras.callbacks


def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5), "mse")
    return made


def fitted(*callbacks):
    """A model after two steps of one epoch."""
    keras.utils.set_random_seed(0)
    made = model()
    x = np.arange(8.0).reshape(4, 2) / 8
    made.fit(x, x[:, :1], batch_size=2, verbose=0, shuffle=False, callbacks=list(callbacks))
    return made


def test_the_fields(tmp_path):
    checkpoint = C.ModelCheckpoint(tmp_path / "a.keras", save_freq=100)
    board = C.TensorBoard(tmp_path)
    fitted(checkpoint, board)
    found = vars(checkpoint) | vars(board) | vars(C.SwapEMAWeights())
    assert [found.get(name) for name in callback_internals.CALLBACK_FIELDS] == [
        2,
        1,
        None,
        2,
        0,
        False,
    ]


def test_says_averages():
    swap = C.SwapEMAWeights(swap_on_epoch=True)
    assert not callback_internals.says_averages(vars(swap))
    fitted(swap)
    assert callback_internals.says_averages(vars(swap))


def test_note_weights_and_with_weights():
    swap, plain = C.SwapEMAWeights(swap_on_epoch=True), fitted()
    callback_internals.note_weights([swap])
    averaged = fitted(swap)
    weights = [plain.optimizer.variables[-2:], averaged.optimizer.variables[-2:]]
    for a, b in zip(*weights, strict=True):  # the averages of both, for now
        np.testing.assert_allclose(a, b, rtol=1e-6)
    with callback_internals.with_weights([swap]):
        kernel, bias = (np.array(v) for v in averaged.optimizer.variables[-2:])
    assert not np.allclose(kernel, weights[0][0]) and not np.allclose(bias, weights[0][1])
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_finalize_averages():
    swap, made = C.SwapEMAWeights(), fitted()
    swap.set_model(made)
    made.layers[0].set_weights([np.full((2, 1), 7.0), np.zeros(1)])
    swap.on_test_begin()
    averages = made.get_weights()
    callback_internals.finalize_averages([swap])
    made.optimizer.finalize_variable_values(made.trainable_variables)
    for a, b in zip(made.get_weights(), averages, strict=True):
        np.testing.assert_array_equal(a, b)


def test_forget_initial_epoch(tmp_path):
    epochs, made = [], model()
    seen = C.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    backup = C.BackupAndRestore(tmp_path, delete_checkpoint=False)
    x, y = np.ones((1, 2)), np.ones(1)
    for callbacks in ([backup], [backup], [seen]):
        made.fit(x, y, epochs=2 if seen in callbacks else 1, verbose=0, callbacks=callbacks)
    callback_internals.forget_initial_epoch(made)
    made.fit(x, y, epochs=2, verbose=0, callbacks=[seen])
    assert epochs == [1, 0, 1]


def two_outputs():
    x = keras.Input((3,))
    return keras.Model(x, [L.Dense(2, name="a")(x), L.Dense(1, name="b")(x)])


def test_compile_arguments():
    model = two_outputs()
    assert loss_internals.compile_arguments(model) == (None, None, None, None)
    given = ["mse", "mae"], [2.0, 3.0], ["mae", "mse"], [["mae"], []]
    model.compile("sgd", *given)
    assert loss_internals.compile_arguments(model) == given


def test_compiled_metrics():
    model = keras.Sequential([keras.Input((3,)), L.Dense(2)])
    model.compile("sgd", "mse")
    assert loss_internals.compiled_metrics(model) is None
    model.compile("sgd", "mse", metrics=["mae"])
    metrics = loss_internals.compiled_metrics(model)
    assert not metrics.built
    metrics.build(tf.TensorSpec([None, 2]), keras.KerasTensor([None, 2]))
    assert metrics.built and len(metrics.variables) == 2


def test_metric_direction():
    metrics = keras.metrics
    made = metrics.SparseCategoricalAccuracy(), metrics.AUC(), metrics.MeanSquaredError()
    directions = [loss_internals.metric_direction(metric) for metric in (*made, metrics.Mean())]
    assert directions == ["up", "up", "down", None]


def test_forget_recipe():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    loss_internals.forget_recipe(model)
    model.compile("sgd")
    assert loss_internals.compile_arguments(model) == (None,) * 4


def test_loss_tracker():
    class Other(keras.Sequential):
        metrics = [keras.metrics.Mean(name="other")]

    for model in (two_outputs(), Other([keras.Input((3,)), L.Dense(2)])):
        model.compile("sgd", "mse", metrics=None)
        tracker = loss_internals.loss_tracker(model)
        assert isinstance(tracker, keras.metrics.Mean) and tracker.name == "loss"
        x, y = np.ones([4, 3]), model(np.ones([4, 3]))
        model.train_on_batch(x, tf.nest.map_structure(np.asarray, y))
        assert tracker.count.numpy() == 4


def test_store_in():
    parameter, other = keras.Variable([[1.0], [2.0]]), tf.Variable([[4.0], [5.0]])
    keras_internals.store_in(parameter, other)
    assert parameter.numpy().tolist() == [[4.0], [5.0]]
