"""What runs once is listed with its line, and what takes time is a warning, once for each model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.divide.whole_and_divided import Case, traced_and_divided
from towers.divide.divided_step import DividedStep, method_of
from towers.divide.machines import Machine
from towers.step.exchange import LocalExchange
from towers.divide.ran_once import RanOnce, warn_of
from towers.machine.devices import REHEARSAL
from towers.machine.user_lines import TowersWarning

L = keras.layers
BATCH = 16


class Positive(keras.Layer):
    """Multiplies the rows that begin with a positive number, of which there may be any number."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3))

    def call(self, x):
        chosen = tf.boolean_mask(x, x[:, 0] > 0)
        product = tf.matmul(chosen, self.kernel)  # the line that the warning names
        return x[:, :3] + tf.reduce_sum(product, 0)


class Sorted(keras.Layer):
    """Sorts each feature of the batch."""

    def call(self, x):
        return tf.sort(x, axis=0)


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(BATCH, 6)).astype("float32"), rng.integers(0, 3, BATCH)


def model_with(layer):
    layers = [layer, L.Dense(4, "relu"), L.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return towers.make_parallel(model, 2, num_towers=2)


def line_number(text):
    with open(__file__, encoding="utf-8") as file:
        return 1 + next(i for i, line in enumerate(file) if text in line)


def test_a_product_that_runs_once_is_a_warning_with_the_users_line():
    model = model_with(Positive())
    x, y = data()
    line = f"ran_once_test.py:{line_number('# the line that the warning names')}"
    with pytest.warns(TowersWarning) as caught:
        model.fit(x, y, BATCH, epochs=2, verbose=0)
        model.evaluate(x, y, BATCH, verbose=0)
    assert len(caught) == 1
    assert f"{line}: MatMul (2 times, " in str(caught[0].message)
    row = next(row for row in towers.ran_once(model) if row.operation == "MatMul")
    assert (row.line, row.times) == (line, 2)  # forward, and the gradient of the kernel
    assert row.cause.startswith("Where of ran_once_test.py:") and 0 < row.share < 1
    assert row.num_bytes == BATCH * 6 * 4  # float32; as if all rows were chosen


@pytest.mark.filterwarnings("error")
def test_small_rows_that_are_gathered_are_listed_without_a_warning():
    model = model_with(Sorted())
    x, y = data()
    assert towers.ran_once(model) == []  # no step yet
    model.fit(x, y, BATCH, verbose=0)
    found = {row.operation: row for row in towers.ran_once(model)}
    assert found["TopKV2"].num_bytes == BATCH * 6 * 4  # float32
    assert found["TopKV2"].cause == ""
    assert "MatMul" not in found  # towers share the rows again


def test_a_product_of_the_entries_of_ragged_rows_is_a_warning():
    class OnEntries(keras.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(2, 3))

        def call(self, x):
            made = tf.ragged.map_flat_values(tf.matmul, x, tf.convert_to_tensor(self.kernel))
            return tf.reduce_sum(made, axis=1)

    rows = keras.Input((None, 2), ragged=True)
    model = keras.Model(rows, L.Dense(1)(OnEntries()(rows)))
    model.compile("sgd", "mse")
    x = tf.RaggedTensor.from_row_lengths(tf.ones([6, 2]), [1, 0, 3, 2])
    with pytest.warns(TowersWarning, match=r"ran_once_test.py:\d+: MatMul \(2 times"):
        towers.make_parallel(model, 2, num_towers=2).fit(x, np.ones((4, 1)), verbose=0)


@pytest.mark.parametrize("rehearses_gpus", ["0", "1"])
def test_the_bytes_are_those_of_the_newest_batch_also_if_shards_are_sent_ahead(
    rehearses_gpus, monkeypatch
):
    monkeypatch.setenv(REHEARSAL, rehearses_gpus)
    with tf.device("/cpu:0"):
        model = model_with(Sorted())
    model.fit(*data(), batch_size=BATCH, verbose=0)
    assert max(row.num_bytes for row in towers.ran_once(model)) >= BATCH * 6 * 4


def test_more_than_16_mb_of_rows_is_a_warning_that_says_what_to_change():
    row = RanOnce("model.py:31", "TopKV2", 1, "", 15_000_000, 0.4)
    assert not warn_of([row], "name", "here")
    with pytest.warns(TowersWarning, match="model 'name' .*model.py:31: TopKV2 .*16.5 MB.*40%"):
        assert warn_of([row._replace(num_bytes=16_500_000)], "name", "here")


@pytest.mark.filterwarnings("error")
def test_the_bytes_of_all_triples_of_rows_grow_with_their_cube():
    def triples(x):
        return tf.cumsum(x[:, None, None, 0] * x[:, None, 0] * x[:, 0], axis=0)

    _, divided = traced_and_divided([Case("Cumsum", triples, (("n", 3),))])
    for n in (2, 11, 300):
        row = next(row for row in divided.runs_once.rows(n) if row.operation == "Cumsum")
        assert row.num_bytes == n**3 * 8


def test_one_tower_loses_nothing():
    model = towers.make_parallel(model_with(Positive()), 1, num_towers=1)
    x, y = data()
    model.fit(x, y, BATCH, verbose=0)


def test_only_parallel_models_have_the_list():
    with pytest.raises(ValueError, match="'plain' is not parallel: call towers.make_parallel"):
        towers.ran_once(keras.Sequential(name="plain"))


class Tied(keras.Layer):
    """Multiplies by the table of an embedding, as language models do."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def call(self, x):
        return x @ keras.ops.transpose(self.embedding.embeddings)


def test_the_gradient_of_a_table_that_two_inputs_look_up_and_outputs_share_runs_in_towers(float64):
    def trained(num_towers):
        keras.utils.set_random_seed(1)
        left, right = (keras.Input((n,), dtype="int32") for n in (5, 3))
        table = L.Embedding(50, 4)
        rows = L.Concatenate(axis=1)([table(left), table(right)])
        model = keras.Model([left, right], Tied(table)(L.GlobalAveragePooling1D()(rows)))
        if num_towers:
            model = towers.make_parallel(model, 2, num_towers=num_towers)
        model.compile("adam", "mse", jit_compile=False)
        rng = np.random.default_rng(0)
        for n in (11, 2):
            x = [rng.integers(0, 50, (n, 5)), rng.integers(0, 50, (n, 3))]
            model.train_on_batch(x, rng.normal(size=(n, 50)))
        return model

    ours, theirs = trained(3), trained(0)
    assert towers.ran_once(ours) == []
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)


SIZES = {"Xception": 71, "InceptionV3": 75}  # the smallest images; 32 for others


@pytest.mark.telling("MobileNet", "VGG16")
@pytest.mark.parametrize("name", [
    "ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "InceptionV3", "MobileNet", "MobileNetV2",
    "NASNetMobile", "ResNet50", "VGG16", "Xception",
])  # fmt: skip
def test_nothing_of_an_application_of_keras_runs_once(name):
    shape = (SIZES.get(name, 32),) * 2 + (3,)
    model = getattr(keras.applications, name)(weights=None, classes=10, input_shape=shape)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    machine = Machine(["/cpu:0"] * 2, LocalExchange(2))
    step = DividedStep(method_of(model, "train_step"), machine)
    step.prepare((tf.TensorSpec((None, *shape)), tf.TensorSpec((None,), np.int32)))
    assert step.ran_once(BATCH) == []
