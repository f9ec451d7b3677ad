"""Ragged and sparse tensors as inputs, labels and outputs, wherever a batch goes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.conformance.cases import ODD
from towers import TrainConfig
from towers.app.diagnosis import plan
from towers.machine.policy import CPU, GPU
from towers.step import TowerStep
from towers.step.prefetch import prefetched
from towers.step.structures import batch_specs

CASES = {case.name: case for case in ODD}
NAMES = ["ragged", "ragged_output", "sparse"]
L = keras.layers


def compiled(name, seed=3):
    case = CASES[name]
    keras.utils.set_random_seed(seed)
    model = case.build()
    model.compile("adam", jit_compile=False, **case.compile)
    return model


def examples(name, count=23, seed=0):
    return CASES[name].batch(count, np.random.default_rng(seed))


def assert_same(ours, theirs, tolerance=1e-12):
    pairs = zip(tf.nest.flatten(ours, True), tf.nest.flatten(theirs, True), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=tolerance, atol=tolerance)


@pytest.mark.telling("ragged")
@pytest.mark.parametrize("name", NAMES)
def test_fit_evaluate_and_predict_are_keras(name, float64):
    x, y, weights = examples(name)

    def results(model):
        history = model.fit(x, y, sample_weight=weights, batch_size=8, epochs=2, verbose=0)
        loss = model.evaluate(x, y, sample_weight=weights, batch_size=8, verbose=0)
        return history.history["loss"], loss, model.predict(x, batch_size=8, verbose=0)

    parallel = towers.make_parallel(compiled(name), 5)
    assert_same(results(parallel), results(compiled(name)))


def to_dense(y):
    return tf.sparse.to_dense(y) if isinstance(y, tf.SparseTensor) else y


def square_error(y, y_pred):
    return tf.reduce_mean(tf.square(to_dense(y) - y_pred), axis=-1)


def absolute_row_error(y, y_pred):
    return tf.reduce_sum(tf.abs(y - y_pred), axis=[1, 2])


def test_metrics_of_a_step_take_sparse_and_ragged_labels(float64):
    x, y, _ = examples("sparse")
    for labels in (y, tf.sparse.from_dense(y)):
        step = TowerStep(compiled("sparse"), "sgd", square_error, metrics=[square_error],
                         devices=towers.tower_devices(3, "cpu"))
        logs = step(x, labels)
        np.testing.assert_allclose(logs["square_error"], logs["loss"], rtol=1e-6)
    x, y, _ = examples("ragged_output")
    step = TowerStep(compiled("ragged_output"), "sgd", **CASES["ragged_output"].compile,
                     metrics=[absolute_row_error], devices=towers.tower_devices(3, "cpu"))
    expected = np.mean(absolute_row_error(y, compiled("ragged_output")(x)))
    np.testing.assert_allclose(step(x, y)["absolute_row_error"], expected, rtol=1e-6)


@pytest.mark.telling("cpu")
@pytest.mark.parametrize(
    "name, policy", [("ragged", CPU), ("ragged_output", GPU), ("sparse", GPU)],
    ids=["cpu", "gpu", "sparse"],
)
def test_prefetched_shards_and_any_devices_give_the_same_bits(name, policy):
    def trained(num_devices, to_devices):
        model = compiled(name)
        devices = towers.tower_devices(num_devices, "cpu")
        step = TowerStep(
            model, "adam", **CASES[name].compile, devices=devices, num_towers=4, policy=policy
        )
        batches = [examples(name, count, seed=count) for count in (9, 8, 3)]
        for batch in prefetched(step, batches, to_devices=to_devices):
            step.train_batch(**batch._asdict())
        return [v.numpy() for v in model.variables]

    expected = trained(1, False)
    for num_devices, to_devices in [(4, False), (4, True), (2, True)]:
        for ours, theirs in zip(trained(num_devices, to_devices), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


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
            model, "sgd", "mse", devices=towers.tower_devices(num_towers, "cpu"),
            batch_norm="synchronized",
        )
        rng = np.random.default_rng(0)
        lengths = [1, 5, 2, 4, 3, 3, 1, 5, 2, 4]
        x = tf.RaggedTensor.from_row_lengths(rng.integers(0, 20, 30), lengths)
        step(x, rng.normal(size=(10, 3)))
        return model.get_weights()

    assert_same(trained(4), trained(1), 1e-10)


def ragged_run(run_dir, **options):
    x, y, _ = examples("ragged", 40)
    test_x, test_y, _ = examples("ragged", 9, seed=1)
    config = TrainConfig(
        num_gpus=2, batch_size=8, epochs=2, run_dir=str(run_dir), seed=1, **options
    )
    model = compiled("ragged")
    return model, config, (tf.cast(x, tf.int32), y), (test_x, test_y)


def test_a_run_trains_on_ragged_examples_and_goes_on_to_the_same_bits(tmp_path):
    model, config, train, test = ragged_run(tmp_path / "whole")
    history = towers.train(config, model=model, train=train, test=test)
    assert len(history["val_loss"]) == 2

    parted, config, train, test = ragged_run(tmp_path / "parted", max_steps=7)
    towers.train(config, model=parted, train=train, test=test)
    parted, _, train, test = ragged_run(tmp_path / "parted")
    towers.train(
        TrainConfig(resume=str(tmp_path / "parted"), max_steps=10), model=parted, train=train,
        test=test,
    )
    for ours, theirs in zip(parted.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_run_trains_on_sparse_examples_as_on_dense_ones(tmp_path, float64):
    x, y, _ = examples("sparse", 20)
    dense = {**x, "words": tf.sparse.to_dense(x["words"])}

    def losses(run_dir, split):
        config = TrainConfig(num_gpus=2, batch_size=8, epochs=2, run_dir=str(run_dir), seed=1)
        return towers.train(config, model=compiled("sparse"), train=split, test=split)["loss"]

    expected = losses(tmp_path / "dense", (dense, y))
    np.testing.assert_allclose(losses(tmp_path / "sparse", (x, y)), expected, rtol=1e-10)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    assert np.isfinite(losses(tmp_path / "dataset", dataset)).all()


@pytest.mark.telling("ragged")
@pytest.mark.parametrize("name", ["ragged", "sparse"])
def test_resume_goes_on_with_ragged_and_sparse_arrays(name, tmp_path):
    x, y, _ = examples(name, 40)

    def fit(run, epochs, model):
        parallel = towers.make_parallel(model, 2)
        resume = towers.Resume(tmp_path / run, every=3)
        parallel.fit(
            x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=[resume], validation_split=0.1
        )
        return parallel.get_weights()

    whole = fit("whole", 2, compiled(name))
    fit("parted", 1, compiled(name))
    for ours, theirs in zip(fit("parted", 2, compiled(name)), whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)

    def predict_step(self, data):
        return super().predict_step(data)


@pytest.mark.filterwarnings("error:.*only its own rows")
@pytest.mark.telling("ragged_output", "sparse")
@pytest.mark.parametrize("name", NAMES)
def test_own_steps_are_keras(name, float64):
    def results(model, num_towers=None):
        own = OwnStep(model.input, model.output)
        own = towers.make_parallel(own, 2, num_towers=num_towers) if num_towers else own
        own.compile("adam", jit_compile=False, **CASES[name].compile)
        x, y, weights = examples(name)
        history = own.fit(x, y, sample_weight=weights, batch_size=8, epochs=2, verbose=0).history
        return history["loss"], own.predict(x, batch_size=8, verbose=0), own.get_weights()

    assert_same(results(compiled(name), 5), results(compiled(name)))


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


@pytest.mark.filterwarnings("error:.*only its own rows")
@pytest.mark.parametrize("name", ["ragged_output", "sparse"])
def test_gathered_rows_have_the_large_batch_gradient(name, float64):
    def trained(num_towers=None):
        plain = compiled(name)
        model = Gathered(plain.input, plain.output)
        model = towers.make_parallel(model, 2, num_towers=num_towers) if num_towers else model
        model.compile("adam", jit_compile=False)
        model.fit(*examples(name)[:2], batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    assert_same(trained(5), trained())


def test_what_needs_examples_of_one_shape_says_so(tmp_path):
    for name in ("ragged", "sparse"):
        x, y, _ = examples(name)
        with pytest.raises(ValueError, match="plan counts the bytes of an example"):
            plan.traffic(None, 8, batch_specs((x, y)))
    model, config, train, test = ragged_run(tmp_path / "augmented", augment="tests.objects:none")
    with pytest.raises(ValueError, match="augment needs dense examples, and x is ragged"):
        towers.train(config, model=model, train=train, test=test)
