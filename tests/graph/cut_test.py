"""A traced function, cut into levels: here a step of a model's own."""

import keras
import pytest
import tensorflow as tf

from tests.custom_step.steps import layers, mean_square, pairs
from towers.custom_step.trace import trace_step


class TwoUpdates(keras.Sequential):
    """The loss after an update, clipped, and a second update."""

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = mean_square(self, x, y)
            gradients = tape.gradient(loss, self.trainable_weights)
            gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"loss": loss}


@pytest.fixture(name="trace", scope="module")
def _trace():
    model = TwoUpdates(layers())
    model.compile("sgd")
    specs = tuple(tf.TensorSpec([None, *v.shape[1:]], "float32") for v in pairs())
    return trace_step(
        model, model.train_step, specs, parameter_device="/cpu:0", batch_norm="average"
    )


def types(segment):
    return {op.type for op in segment.function_of(0).graph.get_operations()}


def test_towers_compute_gradients_and_home_clips_them(trace):
    assert [m.level for m in trace.collectives.events] == [0, 2, 2]
    assert [u.level for u in trace.collectives.updates] == [1, 3]
    assert sorted(trace.towers) == [0, 2]
    assert all("MatMul" in types(segment) for segment in trace.towers.values())
    assert not any("MatMul" in types(segment) for segment in trace.central_segments.values())
    assert all("Sqrt" in types(trace.central_segments[level]) for level in (1, 3))
