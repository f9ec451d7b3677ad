"""What one tower computes of its shard, seen through a step; and when a step is traced."""

import collections
import inspect
import warnings
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import towers
from tests.step import small_step
from towers.divide.tower_step import TowerStep
from towers.step.prefetch import place

L = keras.layers
TEXTS = ["a b", "b", "a", "a b a", "a", "b", "a", "a"]
JOINED = "_MklNativeConv2DBackpropFilterWithBias"  # a bias' gradient with the filter's


def make_step(model, loss, num_towers):
    return towers.TowerStep(model, "sgd", loss, devices=["/cpu:0"], num_towers=num_towers)


class HalfSquares(keras.Sequential):
    """A loss of its own, which is a sum, by a function that is traced once."""

    half_square = staticmethod(tf.function(lambda values: tf.nn.l2_loss(values)))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.half_square(y_pred - y)


def test_a_sum_that_a_models_own_loss_is_counts_by_its_rows(float64):
    """With ragged, and with empty shards."""
    model = HalfSquares([keras.Input((4,)), L.Dense(2)])
    model.compile("sgd")
    step = towers.TowerStep(model, devices=["/cpu:0"], num_towers=2)
    rng = np.random.default_rng(0)
    for count in (3, 1):
        x, y = rng.normal(size=(count, 4)), rng.normal(size=(count, 2))
        with tf.GradientTape() as tape:
            expected = tf.nn.l2_loss(model(x) - y)
        loss, gradients = step.gradients(x, y)
        step.reset_metrics()
        for ours, theirs in [
            (loss, expected), (step.test_batch(x, y)["loss"], expected),
            *zip(gradients, tape.gradient(expected, model.trainable_variables), strict=True),
        ]:
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


class AddsItsRoot(L.Layer):
    def call(self, x):
        self.add_loss(tf.sqrt(tf.reduce_mean(x**2)))
        return x


@pytest.mark.telling("train")
@pytest.mark.parametrize("method", ["train", "test"])
def test_an_added_loss_that_is_no_mean_is_warned_of_with_its_line(method):
    model = keras.Sequential([keras.Input((4,)), AddsItsRoot(), L.Dense(2)])
    line = inspect.getsourcelines(AddsItsRoot)[1] + 2
    with pytest.warns(UserWarning, match=rf"^tower_test.py:{line} takes Sqrt .*towers.gather"):
        make_step(model, "mse", 2).trace_tower(method, tf.ones([3, 4]), tf.ones([3, 2]), None)


def test_the_weights_of_masks_follow_from_the_inputs_alone():
    """What they are computed from, in the traced graph: no forward pass."""
    model = keras.Sequential([keras.Input((5,), dtype="int32"), L.Embedding(9, 4, mask_zero=True),
                              L.Dense(3, activation="softmax")])
    tokens = tf.constant([[1, 2, 0, 0, 0], [3, 4, 5, 0, 0]])
    step = make_step(model, "sparse_categorical_crossentropy", 2)
    graph = step.tower.trace("train", (tokens, tf.ones_like(tokens), None))[1].function.graph
    needed, left = set(), [*graph.control_outputs, *(t.op for t in graph.outputs)]
    while left:
        operation = left.pop()
        if operation not in needed:
            needed.add(operation)
            left += [*operation.control_inputs, *(tensor.op for tensor in operation.inputs)]
    kinds = [operation.type for operation in graph.get_operations()]
    assert "MatMul" in kinds and "MatMul" not in {operation.type for operation in needed}


# Models whose output for a row depends on other rows


class Of(L.Layer):
    """What a function makes of the rows."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def warned(model, x):
    """What is said before the first step on two towers."""
    options = {"devices": ["/cpu:0"], "num_towers": 2, "batch_norm": "average"}
    step = TowerStep(model, "sgd", "mse", **options)
    y = tf.zeros([8, *model.output_shape[1:]])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step.trace_tower("train", x, y, None)
    return "".join(str(w.message) for w in found)


def of_rows(*functions, before=()):
    layers = [L.Dense(6), *before, *map(Of, functions)]
    return warned(keras.Sequential([keras.Input((6,)), *layers]), tf.ones([8, 6]))


@pytest.mark.parametrize("function", [
    lambda x: x - tf.reduce_mean(x, axis=0), lambda x: x[::-1],
    lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: x, lambda: 2 * x),
    lambda x: tf.ensure_shape(tf.py_function(lambda v: v[::-1], [x], tf.float32), [None, 6]),
    lambda x: L.UnitNormalization(axis=0)(x),
])
def test_what_computes_across_rows_is_warned_of_with_its_line(function):
    message = of_rows(function)
    assert "Each tower has only its own rows of the batch" in message
    assert "towers.gather(rows)" in message and "tower_test.py:" in message


def test_batch_norm_noise_and_what_stays_in_a_row_pass():
    assert not of_rows(
        tf.square, lambda x: x + tf.random.normal(tf.shape(x)),
        lambda x: x + keras.random.normal((6,), seed=3),
        lambda x: tf.map_fn(lambda row: row / tf.reduce_max(row), x),
        lambda x: tf.reshape(tf.image.resize(tf.reshape(x, [-1, 2, 3, 1]), [4, 4]), [-1, 16]),
        lambda x: tf.abs(tf.signal.rfft(x)), lambda x: tf.reduce_mean(x, axis=1, keepdims=True),
        before=[L.BatchNormalization(), L.Dropout(0.5)])


def of_texts(*layers, **options):
    """Layers on texts as long as the longest of the batch."""
    vectors = L.TextVectorization(vocabulary=["a", "b"], **options)
    model = keras.Sequential([keras.Input((), dtype="string"), vectors, *layers])
    return warned(model, tf.constant(TEXTS))


def padded(*layers, mask=False):
    return [L.Embedding(4, 3, mask_zero=mask), *layers, L.GlobalAveragePooling1D()]


def test_what_computes_with_padding_is_warned_of_unless_it_is_masked_or_of_one_length():
    message = of_texts(*padded())
    assert "as long as the longest row of the batch" in message and "mask_zero=True" in message
    assert not of_texts(*padded(L.LSTM(3, return_sequences=True), mask=True))
    assert not of_texts(*padded(), output_sequence_length=7)


@pytest.mark.parametrize("function, is_warned", [
    (lambda x: tf.reduce_sum(x, axis=1) + x[:, 0], False),
    (lambda x: x[:, -1], True), (lambda x: tf.reduce_max(x, axis=1), True),
])
def test_padding_is_warned_of_only_where_its_length_has_an_effect(function, is_warned):
    assert bool(of_texts(L.Embedding(4, 3), Of(function))) == is_warned


# Graphs


def test_a_structure_is_traced_once_whatever_the_number_of_rows_and_placed_shards_anew():
    step = small_step.make_step(layers=small_step.plain, num_towers=2)
    for count in (8, 3, 5):
        x, y = small_step.batch(count)
        step(x, y)
    assert len(step.traces) == 1
    step(x, y, np.ones(5))
    step.train_batch(x, y, placed=place(step, (x, y, None)))
    assert len(step.traces) == 3


def test_arrays_lie_in_the_cpus_memory_whatever_the_default_device_and_tensors_where_they_are(
    monkeypatch
):
    """Else the first GPU would take a whole batch, which then came back to be split."""
    seen = []
    module = "towers.step.tower_step"
    monkeypatch.setattr(f"{module}.run_in_turn", lambda step, name, *batch: seen.extend(batch))
    monkeypatch.setattr(f"{module}.first_error", lambda run: run() or nullcontext())
    step, (x, y) = small_step.make_step(layers=small_step.plain), small_step.batch(8)
    with tf.device("/cpu:3"):  # a default device, as /gpu:0 is one
        step.test_batch(x, tf.identity(tf.constant(y)))
    assert [part.device[-5:] for part in seen[:2]] == ["CPU:0", "CPU:3"]


def test_a_call_reaches_the_model_through_eight_functions():
    walk = []

    class Looks(L.Layer):
        def call(self, x):
            files = [frame.filename for frame in inspect.stack(0)]
            walk[:] = [name for name in files if "/towers/step/" in name and "/tests/" not in name]
            return x

    model = keras.Sequential([keras.Input((6,)), Looks(), L.Dense(1)])
    towers.TowerStep(model, "sgd", "mse", num_towers=2)(np.ones((4, 6)), np.ones((4, 1)))
    assert len(walk) <= 8


def filters():
    """A filter of one call, and a shared one."""
    x = keras.Input((6, 6, 2))
    shared = L.Conv2D(2, 3, padding="same")
    rows = shared(shared(L.Conv2D(2, 3, activation="relu")(x)))
    return keras.Model(x, L.Dense(2)(L.Flatten()(rows)))


def operations_in(directory):
    """How many operations of each type ran, by a profile; its events are called "node:type"."""
    (path,) = directory.glob("plugins/profile/*/*.xplane.pb")
    planes = xplane_pb2.XSpace.FromString(path.read_bytes()).planes
    return collections.Counter(plane.event_metadata[event.metadata_id].name.rpartition(":")[2]
                               for plane in planes for line in plane.lines for event in line.events)


def test_no_gradients_are_joined_but_for_this(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape).astype("float32") for shape in [(4, 6, 6, 2), (4, 2)])

    def operations():
        step = TowerStep(filters(), "sgd", "mse", devices=["/cpu:0"])
        step.gradients(x, y)  # traces it
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        with tf.profiler.experimental.Profile(str(directory)):
            step.gradients(x, y)
        return operations_in(directory)

    with_it = operations()
    monkeypatch.setattr("towers.step.tower.keep_biases_apart", lambda graph: None)
    without = operations()
    if not any(kind.startswith("_MklNativeConv2D") for kind in without):
        pytest.skip("oneDNN computes no convolution here: there is nothing to join")
    assert without[JOINED] > 0
    assert with_it[JOINED] == 0
    assert with_it["BiasAddGrad"] == without["BiasAddGrad"] + without[JOINED]
