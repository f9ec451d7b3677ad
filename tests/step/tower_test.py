"""One tower on one shard: its share of Keras' own loss and gradients, and no side effects."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

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
