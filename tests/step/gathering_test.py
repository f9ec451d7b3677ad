"""`towers.gather`: by whoever is tracing."""

import threading

import keras
import pytest
import tensorflow as tf

import towers
from towers.step import TowerStep
from towers.step.gathering import gathered_by


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

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="towers.make_parallel"):
        TowerStep(model, "sgd", loss, num_towers=2)(tf.ones([4, 3]), tf.ones([4, 2]))
