"""A traced function, cut into levels: here a step of a model's own."""

import keras
import pytest
import tensorflow as tf

from tests.custom_step.steps import layers, pairs
from towers.graph.cut import cut
from towers.custom_step.trace import trace_step


class TwoUpdates(keras.Sequential):
    """The loss after an update, clipped, and a second update."""

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_weights)
            gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"loss": loss}


@pytest.fixture(name="trace", scope="module")
def _trace():
    model = TwoUpdates(layers())
    model.compile("sgd")
    specs = tuple(tf.TensorSpec([None, *v.shape[1:]], "float32") for v in pairs())
    return trace_step(model, model.train_step, specs, home="/cpu:0", batch_norm="average")


def pieces_of(trace, wanted):
    return cut(trace.function, trace.dependence, wanted)


def types(segment):
    function = segment.function_of(0)
    return {op.type for op in function.graph.get_operations()}


def test_towers_compute_gradients_and_home_clips_them(trace):
    towers = pieces_of(trace, [v for m in trace.collectives for v in m.inputs])
    home = pieces_of(trace, [g for u in trace.updates for g in u.gradients])
    assert [m.level for m in trace.collectives] == [0, 2, 2]
    assert [u.level for u in trace.updates] == [1, 3]
    assert sorted(towers) == [0, 2]
    assert all("MatMul" in types(segment) for segment in towers.values())
    assert not any("MatMul" in types(segment) for segment in home.values())
    assert all("Sqrt" in types(home[level]) for level in (1, 3))
