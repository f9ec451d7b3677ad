"""Ragged and sparse tensors as inputs, labels and outputs, wherever a batch goes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.conformance.cases import ODD
from towers import TrainConfig
from towers.app.diagnosis import plan
from towers.divide.tower_step import TowerStep
from towers.divide.prefetch import prefetched
from towers.step.structures import batch_specs

CASES = {case.name: case for case in ODD}
L = keras.layers


def compiled(name, cls=keras.Model, num_towers=None, **options):
    """A case's model, of a class, parallel if there are towers; else it runs eagerly, as sooner."""
    case = CASES[name]
    keras.utils.set_random_seed(3)
    plain = case.build()
    model = cls(plain.input, plain.output)
    model = towers.make_parallel(model, 2, num_towers=num_towers) if num_towers else model
    arguments = {**case.compile, **options}
    model.compile("adam", jit_compile=False, run_eagerly=not num_towers, **arguments)
    return model


def examples(name, count=23, seed=0):
    return CASES[name].batch(count, np.random.default_rng(seed))


def assert_same(ours, theirs, tolerance=0.0):
    pairs = zip(tf.nest.flatten(ours, True), tf.nest.flatten(theirs, True), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=tolerance, atol=tolerance)


class Custom(keras.Model):
    def train_step(self, data):
        return super().train_step(data)

    def predict_step(self, data):
        return super().predict_step(data)


class Gathered(keras.Model):
    """Its loss is one of the rows of all towers, of a ragged or of a sparse tensor."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            rows = self(data[0], training=True)
            if isinstance(rows, tf.RaggedTensor):
                values = towers.gather(rows).flat_values
            else:
                values = towers.gather(tf.sparse.from_dense(tf.nn.relu(rows))).values
            loss = tf.sqrt(tf.reduce_sum(tf.square(values - 0.5)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.telling("Model-ragged_output", "Gathered-sparse")
@pytest.mark.filterwarnings("error::towers.machine.user_lines.TowersWarning")
@pytest.mark.parametrize(
    "cls, name",
    [
        (keras.Model, "ragged_output"),
        (Custom, "ragged"),
        (Custom, "sparse"),
        (Gathered, "ragged"),
        (Gathered, "sparse"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_fit_evaluate_and_predict_are_keras(cls, name, float64):
    x, y, weights = examples(name)
    options = {}
    if name == "ragged_output":
        options = {"loss": square_row_error, "metrics": [square_row_error]}

    def results(num_towers=None):
        model = compiled(name, cls, num_towers, **options)
        history = model.fit(x, y, sample_weight=weights, batch_size=8, verbose=0).history
        found = [[*history.values()], model.get_weights()]
        if cls is not Gathered:
            found.append(model.predict(x, batch_size=8, verbose=0))
        if cls is Custom:
            found.append(model.evaluate(x, y, sample_weight=weights, batch_size=8, verbose=0))
        return found

    assert_same(results(3), results(), 1e-12)


def square_error(y, y_pred):
    y = tf.sparse.to_dense(y) if isinstance(y, tf.SparseTensor) else y
    return tf.reduce_mean(tf.square(y - y_pred), axis=-1)


def square_row_error(y, y_pred):
    """Traced sooner than y - y_pred, which might broadcast."""
    squares = tf.ragged.map_flat_values(tf.math.squared_difference, y, y_pred)
    return tf.reduce_sum(squares, axis=[1, 2])


def test_metrics_of_a_step_take_sparse_labels(float64):
    devices, (x, y, _) = towers.tower_devices(2, "cpu"), examples("sparse")
    step = TowerStep(
        compiled("sparse"),
        "sgd",
        square_error,
        metrics=[square_error],
        devices=devices,
        jit_compile=False,
    )
    logs = step(x, tf.sparse.from_dense(y))
    np.testing.assert_allclose(logs["square_error"], logs["loss"], rtol=1e-6)


@pytest.mark.telling("ragged")
@pytest.mark.parametrize("name", ["ragged", "sparse"])
def test_prefetched_shards_and_any_devices_give_the_same_bits(name):
    def trained(num_devices, to_devices):
        model = compiled(name)
        devices = towers.tower_devices(num_devices, "cpu")
        options = {"devices": devices, "num_towers": 4, "jit_compile": False}
        step = TowerStep(model, "adam", **CASES[name].compile, **options)
        batches = [examples(name, count, seed=count) for count in (9, 8, 3)]
        for batch in prefetched(step, batches, to_devices=to_devices):
            step.train_batch(**batch._asdict())
        return model.get_weights()

    assert_same(trained(4, True), trained(1, False))


class Normalized(L.Layer):
    """BatchNormalization of the first value of each row."""

    def __init__(self):
        super().__init__()
        self.norm = L.BatchNormalization()

    def build(self, shape):
        self.norm.build((None, shape[-1]))

    def call(self, x, training=None):
        rows = x.to_tensor(0.0)[:, 0] if isinstance(x, tf.RaggedTensor) else x[:, 0]
        return self.norm(rows, training=training)

    def compute_output_shape(self, shape):
        return shape[0], shape[2]


def test_a_synchronized_tower_takes_ragged_input(float64):
    def trained(num_towers):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((None,), dtype="int32", ragged=True)
        model = keras.Model(inputs, L.Dense(3)(Normalized()(L.Embedding(20, 4)(inputs))))
        step = TowerStep(
            model,
            "sgd",
            "mse",
            devices=towers.tower_devices(num_towers, "cpu"),
            batch_norm="synchronized",
            jit_compile=False,
        )
        rng = np.random.default_rng(0)
        lengths = [1, 5, 2, 4, 3, 3, 1, 5, 2, 4]
        x = tf.RaggedTensor.from_row_lengths(rng.integers(0, 20, 30), lengths)
        step(x, rng.normal(size=(10, 3)))
        return model.get_weights()

    assert_same(trained(3), trained(1), 1e-10)


def run(name, split, config=None, **options):
    """(history, weights) of towers.train on a split of a case's examples."""
    model = compiled(name)
    config = config or TrainConfig(num_gpus=2, batch_size=8, epochs=2, seed=1, **options)
    return towers.train(config, model=model, train=split, test=split), model.get_weights()


@pytest.mark.telling("ragged")
@pytest.mark.parametrize("name", ["ragged", "sparse"])
def test_a_run_trains_on_ragged_examples_and_resumes_to_the_same_bits(
    name, tmp_path, without_charts
):
    x, y, _ = examples(name, 20)
    dtype = tf.int32 if name == "ragged" else tf.float32
    split = tf.nest.map_structure(lambda part: tf.cast(part, dtype), x), y
    history, weights = run(name, split, run_dir=tmp_path / "whole")
    assert len(history["val_loss"]) == 2
    run(name, split, run_dir=tmp_path / "parted", max_steps=4)
    resumed = TrainConfig(resume=tmp_path / "parted", trust_run_dir=True, max_steps=6)
    assert_same(run(name, split, resumed), (history, weights))
    with pytest.raises(ValueError, match="augment needs dense examples, and x is ragged"):
        run(name, split, run_dir=tmp_path / "augmented", augment="tests.objects:none")


def test_a_plan_of_ragged_or_sparse_examples_is_an_error():
    for name in ("ragged", "sparse"):
        x, y, _ = examples(name)
        with pytest.raises(ValueError, match="plan counts the bytes of an example"):
            plan.traffic(None, 8, batch_specs((x, y)))
