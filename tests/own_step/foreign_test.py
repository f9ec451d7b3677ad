"""What a step takes from outside that is no value and no variable of Keras'."""

import keras
import tensorflow as tf

import towers
from tests.own_step.steps import fit_alike, model_with, refused


def test_a_tf_variable_that_is_assigned_in_part_is_refused_by_name_and_line():
    mine = tf.Variable([2.0, 3.0], name="mine")

    def step(model, data):
        mine[:1].assign([4.0])
        return {"loss": tf.reduce_mean(data[0]) * mine[0]}

    message = refused(step)
    assert "foreign_test.py:" in message and "'mine:0'" in message
    assert "keras.Variable" in message


def test_a_random_generator_is_refused():
    generator = tf.random.Generator.from_seed(1)

    def step(model, data):
        return {"loss": tf.reduce_mean(data[0] + generator.normal(tf.shape(data[0])))}

    assert "SeedGenerator" in refused(step)


def test_a_lookup_table_is_refused():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1], [5.0, 6.0]), 7.0)

    def step(model, data):
        return {"loss": tf.reduce_mean(table.lookup(tf.cast(data[0] > 0, tf.int32)))}

    message = refused(step)
    assert "foreign_test.py:" in message and "lookup table" in message and "dataset.map" in message


def test_a_summary_writer_is_refused(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))

    def step(model, data):
        with writer.as_default(step=1):
            tf.summary.scalar("mean", tf.reduce_mean(data[0]))
        return {"loss": tf.reduce_mean(data[0])}

    assert "callback" in refused(step)


def test_values_from_outside_and_keras_variables_are_used(float64):
    constant, variable = tf.constant([1.0, 2.0, 3.0, 4.0], "float64"), keras.Variable(3.0)
    grid, mean = tf.ones([3, 4], "float64"), keras.metrics.Mean()

    def step(model, data):
        mean.update_state(constant)
        return {"loss": tf.reduce_mean(data[0] * constant) * variable,
                "grid": tf.reduce_mean(model.layers[0](grid)), "variable": variable,
                "gathered": tf.reduce_sum(towers.gather(constant)), "constant": constant[0]}

    fit_alike(lambda: model_with(step))
