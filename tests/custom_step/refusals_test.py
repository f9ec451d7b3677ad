"""What a custom step cannot do on towers: one error, which names the line and says what to do."""

import keras
import pytest
import tensorflow as tf

import towers
from tests.custom_step.steps import refused

HERE = "refusals_test.py:"


def differentiates_weights_and_rows_at_once(model, data):
    with tf.GradientTape() as tape:
        tape.watch(data[0])
        loss = tf.reduce_mean(model(data[0]))
    tape.gradient(loss, [data[0], *model.trainable_weights])
    return {"loss": loss}


def computes_again(model, data):
    hidden = keras.remat(lambda rows: tf.tanh(model.layers[0](rows)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(hidden(data[0]) ** 2)
    tape.gradient(loss, model.trainable_weights[:2])
    return {"loss": loss}


def learns_in_a_loop(model, data):
    x, y = data

    def learn(i, fast):
        with tf.GradientTape() as tape:
            tape.watch(fast)
            loss = tf.reduce_mean((x @ fast - y) ** 2)
        return i + 1, fast - 0.1 * tape.gradient(loss, fast)

    _, fast = tf.while_loop(lambda i, _: i < 2, learn, [0, tf.ones([4, 2])])
    return {"value": tf.reduce_mean(x @ fast)}


def returns_a_value_of_unknown_shape(model, data):
    return {"value": tf.py_function(tf.reduce_mean, [data[0]], tf.float32)}


def returns_a_number_of_rows(model, data):
    return {"count": tf.shape(data[0])[0]}


def makes_a_layer_each_time(model, data):
    return {"loss": tf.reduce_mean(keras.layers.Dense(2)(data[0]))}


def gathers_a_scalar(model, data):
    return {"loss": towers.gather(tf.reduce_mean(data[0]))}


def gathers_two_views_at_once(model, data):
    return {"loss": tf.reduce_mean(towers.gather(tf.concat([data[0], data[0]], axis=0)))}


def has_labels_for_11_rows(model, data):
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return {"loss": loss(tf.concat([tf.ones([5, 2]), tf.zeros([6, 2])], axis=0), model(data[0]))}


def has_classes_for_11_rows(model, data):
    similar = tf.matmul(data[0], data[0], transpose_b=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"loss": loss(keras.ops.arange(11), similar)}


@pytest.mark.parametrize("step, words", [
    (differentiates_weights_and_rows_at_once, [HERE, "persistent=True"]),
    (computes_again, [HERE, "keras.remat"]),
    (learns_in_a_loop, [HERE, "write the loop in Python"]),
    (returns_a_value_of_unknown_shape, ["'value', which the step returns", "tf.ensure_shape"]),
    (returns_a_number_of_rows, ["'count'", "Cast it to float"]),
    (makes_a_layer_each_time, ["'own'", "__init__"]),
    (gathers_a_scalar, [HERE, "has no batch axis"]),
    (gathers_two_views_at_once, [HERE, "Gather two views of a batch one by one"]),
    (has_labels_for_11_rows, [HERE, "with 11 others", "tf.ones_like"]),
    (has_classes_for_11_rows, [HERE, "with 11 others"]),
], ids=lambda value: getattr(value, "__name__", ""))
def test_what_towers_cannot_compute_is_refused(step, words):
    message = refused(step)
    assert [word for word in words if word not in message] == [], message


# What lives outside of the step.


def assigns_a_part_of_a_variable():
    mine = tf.Variable([2.0, 3.0], name="mine")

    def step(model, data):
        mine[:1].assign([4.0])
        return {"loss": tf.reduce_mean(data[0]) * mine[0]}

    return step


def draws_by_a_generator():
    generator = tf.random.Generator.from_seed(1)
    return lambda model, data: {
        "loss": tf.reduce_mean(data[0] + generator.normal(tf.shape(data[0])))}


def writes_a_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 7.0)

    def step(model, data):
        table.insert(tf.constant([1]), tf.constant([2.0]))
        return {"loss": tf.reduce_mean(data[0])}

    return step


def writes_a_summary():
    writer = tf.summary.create_file_writer("unused")

    def step(model, data):
        with writer.as_default(step=1):
            tf.summary.scalar("mean", tf.reduce_mean(data[0]))
        return {"loss": tf.reduce_mean(data[0])}

    return step


def updates_a_metric_that_is_no_sum():
    metric = keras.metrics.Mean(name="largest")

    def step(model, data):
        metric.total.assign(tf.maximum(metric.total, tf.reduce_max(data[0])))
        return {"largest": metric.total}

    return step


@pytest.mark.parametrize("make, words", [
    (assigns_a_part_of_a_variable, [HERE, "'mine:0'", "add_weight"]),
    (draws_by_a_generator, ["SeedGenerator"]),
    (writes_a_table, [HERE, "writes to a lookup table"]),
    (writes_a_summary, ["callback"]),
    (updates_a_metric_that_is_no_sum, [HERE, "largest", "gather"]),
], ids=lambda value: getattr(value, "__name__", ""))
def test_state_that_towers_cannot_share_is_refused(make, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(make())
    assert [word for word in words if word not in message] == [], message
