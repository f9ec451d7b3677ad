"""One tower on one shard: its share of Keras' own loss and gradients, and no side effects."""

import inspect
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.step.assigned import NOTHING
from towers.step.losses import Shares
from towers.step.outputs import ModelLoss
from towers.step.tower import Tower, TowerInput

L = keras.layers


def regression(*layers):
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((4,)), L.Dense(5, activation="tanh"), *layers, L.Dense(2)])


def shard(size=3):
    rng = np.random.default_rng(size)
    return tf.constant(rng.normal(size=(size, 4))), tf.constant(rng.normal(size=(size, 2)))


def values(variables):
    return [tf.convert_to_tensor(v.value) for v in variables]


def shares(output, examples):
    return Shares(tf.constant([output], tf.float64), tf.constant(examples, tf.float64))


def run(tower, model, x, y, of_shares=None, *, method="train", sample_weight=None, loss_scale=1.0):
    """Traces and calls a method of the tower at the model's values."""
    state = values(model.non_trainable_variables)
    inputs = TowerInput(values(model.trainable_variables), state, x, y, sample_weight)
    is_train = method == "train"
    given = (tf.constant(loss_scale),) if is_train else ()
    arguments = inputs, of_shares or shares(1.0, 1.0), *given
    traced, _ = tower.trace(method, (x, y, sample_weight))
    return traced.run([arguments], ["/cpu:0"], None, take_turns=False)[0]


def test_loss_and_gradients_are_kerass_times_the_share(float64):
    model = regression()
    x, y = shard()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    expected = tape.gradient(loss, model.trainable_variables)
    output = run(Tower(model, "mse", None), model, x, y, shares(0.25, 0.5))
    np.testing.assert_allclose(output.loss, 0.25 * loss, rtol=1e-14)
    for ours, theirs in zip(output.gradients, expected, strict=True):
        np.testing.assert_allclose(ours, 0.25 * theirs, rtol=1e-12, atol=1e-16)
    np.testing.assert_allclose(output.predictions[0], model(x), rtol=1e-12)


def test_a_loss_scale_multiplies_the_gradients_and_not_the_loss(float64):
    model = regression()
    plain, scaled = (run(Tower(model, "mse", None), model, *shard(), loss_scale=scale)
                     for scale in (1.0, 1024.0))
    assert float(plain.loss) == float(scaled.loss)
    for a, b in zip(plain.gradients, scaled.gradients, strict=True):
        np.testing.assert_array_equal(1024 * a.numpy(), b)  # a power of two rounds nothing


def test_a_tower_changes_no_variable_and_hands_its_state_out(float64):
    model = regression(L.BatchNormalization(momentum=0.5), L.Dropout(0.5))
    before = [v.numpy() for v in model.variables]
    tower = Tower(model, "mse", None)
    x, y = shard()
    outputs = [run(tower, model, x, y) for _ in range(2)]
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    mean, variance = outputs[0].assigned.parts.values()
    (seed,) = outputs[0].assigned.same.values()
    activations = model.layers[0](x)
    np.testing.assert_allclose(mean, 0.5 * tf.reduce_mean(activations, 0), rtol=1e-12)
    np.testing.assert_allclose(
        variance, 0.5 + 0.5 * tf.math.reduce_variance(activations, 0), rtol=1e-12
    )
    assert seed.numpy().tolist() != model.non_trainable_variables[2].numpy().tolist()
    flat = [tf.nest.flatten([o.loss, o.gradients, o.assigned]) for o in outputs]
    for a, b in zip(*flat, strict=True):
        np.testing.assert_array_equal(a, b)  # the same values in, the same out


def test_state_that_nothing_changes_is_not_handed_out():
    model = regression(L.BatchNormalization())
    model.layers[1].trainable = False
    x, y = (tf.cast(v, tf.float32) for v in shard())
    output = run(Tower(model, "mse", None), model, x, y)
    assert output.assigned == NOTHING
    assert len(output.gradients) == len(model.trainable_variables)


def test_the_values_given_count_not_those_of_the_variables(float64):
    model = regression()
    x, y = shard()
    zeros = [tf.zeros_like(v) for v in values(model.trainable_variables)]
    inputs = TowerInput(zeros, [], x, y, None)
    tower = Tower(model, "mse", None).trace("test", (x, y, None))[0]
    (output,) = tower.run([(inputs, shares(1.0, 1.0))], ["/cpu:0"], None, take_turns=False)
    np.testing.assert_allclose(output.loss, np.mean(y.numpy() ** 2), rtol=1e-14)
    assert not output.predictions[0].numpy().any()


def test_evaluation_and_prediction_are_in_inference_mode():
    model = regression(L.Dropout(0.9))
    x, y = (tf.cast(v, tf.float32) for v in shard())
    tower = Tower(model, "mse", None)
    expected = model(x, training=False)
    for method in ("test", "predict"):
        output = run(tower, model, x, y, method=method)
        np.testing.assert_allclose(output.predictions[0], expected, rtol=1e-5)
        assert output.gradients == [] and output.assigned == NOTHING
    assert float(run(tower, model, x, y, method="predict").loss) == 0
    loss = run(tower, model, x, y, shares(0.5, 1.0), method="test").loss
    np.testing.assert_allclose(loss, 0.5 * np.mean((expected - y) ** 2), rtol=1e-5)


class AddsItsMean(L.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


def test_losses_that_layers_add_count_by_examples_and_outputs_by_their_share(float64):
    model = regression(AddsItsMean())
    x, y = shard()
    hidden = model.layers[0](x)
    expected = 0.25 * tf.reduce_mean((model(x) - y) ** 2) + 0.5 * tf.reduce_mean(hidden**2)
    output = run(Tower(model, "mse", None), model, x, y, shares(0.25, 0.5))
    np.testing.assert_allclose(output.loss, expected, rtol=1e-13)


def test_a_models_own_loss_replaces_the_outputs(float64):
    model = regression()
    x, y = shard()

    def compute(x, y, y_pred, sample_weight, training):
        assert sample_weight is None and training
        return tf.reduce_mean(tf.abs(y_pred - y))

    output = run(Tower(model, ModelLoss(compute), None), model, x, y, shares(9.0, 0.5))
    np.testing.assert_allclose(output.loss, 0.5 * np.abs(model(x) - y).mean(), rtol=1e-14)


@pytest.mark.parametrize("method", ["train", "test"])
def test_a_sum_that_a_models_own_loss_is_counts_by_its_rows(method, float64):
    model = regression()
    x, y = shard()
    tower = Tower(model, ModelLoss(lambda x, y, y_pred, *_: tf.nn.l2_loss(y_pred - y)), None)
    output = run(tower, model, x, y, shares(9.0, 0.5), method=method)
    np.testing.assert_allclose(output.loss, tf.nn.l2_loss(model(x) - y), rtol=1e-14)
    empty = run(tower, model, x, y, shares(9.0, 0.0), method=method)
    assert float(empty.loss) == 0.0 and not any(np.any(g) for g in empty.gradients)


class AddsItsRoot(L.Layer):
    def call(self, x):
        self.add_loss(tf.sqrt(tf.reduce_mean(x**2)))
        return x


@pytest.mark.parametrize("method", ["train", "test"])
def test_an_added_loss_that_is_no_mean_is_warned_of_with_its_line(method):
    model = regression(AddsItsRoot())
    x, y = (tf.cast(v, tf.float32) for v in shard())
    line = inspect.getsourcelines(AddsItsRoot)[1] + 2
    with pytest.warns(UserWarning, match=rf"^tower_test.py:{line} takes Sqrt .*towers.gather"):
        run(Tower(model, "mse", None), model, x, y, method=method)


def test_added_means_sums_and_regularizers_are_not_warned_of():
    model = regression(
        AddsItsMean(), L.Dense(3, kernel_regularizer="l2", activity_regularizer="l1"))
    x, y = (tf.cast(v, tf.float32) for v in shard())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(Tower(model, "mse", None), model, x, y)


@pytest.mark.parametrize("checked, expected", [
    ((), None),
    (("loss",), [True]),
    (("loss", "gradients"), [True] * 4 + [False]),  # the last: the output's bias
])
def test_what_is_checked_is_told_apart(checked, expected):
    model = regression()
    model.layers[-1].kernel.assign(np.zeros([5, 2]))  # zero gradients for all but the last bias
    loss = keras.losses.MeanAbsoluteError(name="mae")
    output = run(Tower(model, loss, None, checked=checked), model, tf.zeros([1, 4]),
                 tf.ones([1, 2]), loss_scale=1e21)  # its square overflows in float32
    assert (output.finite if expected is None else output.finite.numpy().tolist()) == expected


def test_a_method_is_traced_once_whatever_the_number_of_examples():
    traces = []

    class Counts(L.Layer):
        def call(self, x):
            traces.append(x.shape[0])
            return x

    model = regression(Counts())
    traces.clear()
    tower = Tower(model, "mse", None, is_alone=True)  # of several, the layer would be tried, too
    for size in (3, 1, 7):
        x, y = (tf.cast(v, tf.float32) for v in shard(size))
        assert run(tower, model, x, y).predictions[0].shape == (size, 2)
    assert traces == [None]
    run(tower, model, x, y, sample_weight=tf.ones([7]))  # another structure
    assert traces == [None, None]


def test_the_weights_of_masks_follow_from_the_inputs_alone():
    """What they are computed from, in the traced graph: no forward pass."""
    model = keras.Sequential([
        keras.Input((5,), dtype="int32"), L.Embedding(9, 4, mask_zero=True),
        L.Dense(3, activation="softmax"),
    ])
    tokens = tf.constant([[1, 2, 0, 0, 0], [3, 4, 5, 0, 0]])
    tower = Tower(model, "sparse_categorical_crossentropy", None)
    labels = tf.ones_like(tokens)
    inputs = TowerInput(values(model.trainable_variables), [], tokens, labels, None)
    function = tower.trace("train", (tokens, labels, None))[1].function
    assert function(inputs, tf.constant(2)).numpy().tolist() == [2 + 3]
    needed, left = set(), [*function.graph.control_outputs, *(t.op for t in function.graph.outputs)]
    while left:
        operation = left.pop()
        if operation not in needed:
            needed.add(operation)
            left += [*operation.control_inputs, *(tensor.op for tensor in operation.inputs)]
    kinds = [operation.type for operation in function.graph.get_operations()]
    assert "MatMul" in kinds and "MatMul" not in {operation.type for operation in needed}
