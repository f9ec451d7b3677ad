"""Which models make_parallel takes, and what the parallel model shares with its model."""

import os

import keras
import numpy as np
import pytest

import towers
from tests import processes
from tests.parallel.pairs import (
    CLASSIFIER,
    TOLERANCE,
    assert_same_fit,
    build_pair,
    classifier,
    rows,
)
from tests.processes import ROOT
from towers.parallel.parallel_model import ParallelModel
from towers.step import state

L = keras.layers
pytestmark = pytest.mark.usefixtures("float64")


@keras.saving.register_keras_serializable("towers_tests")
class Subclassed(keras.Model):
    """6 numbers -> 3 classes; its sublayers make their variables on the first call."""

    def __init__(self, units=8, **options):
        super().__init__(**options)
        self.units = units
        self.hidden = L.Dense(units, activation="tanh", name="hidden")
        self.last = L.Dense(3, activation="softmax", name="last")

    def call(self, x):
        return self.last(self.hidden(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class OwnWeight(Subclassed):
    """Makes a variable in `build`, and an attribute that is None."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="scale")
        super().build(input_shape)
        self.bias = None  # as Dense.build does without a bias

    def call(self, x):
        return super().call(x * self.scale if self.bias is None else x)


class OwnMetrics(Subclassed):
    """A metric of its own over inputs, labels and predictions."""

    def __init__(self, **options):
        super().__init__(**options)
        self.own = keras.metrics.Mean(name="own")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        self.own.update_state(keras.ops.sum(x, axis=-1) * y_pred[:, 0])
        return {**logs, "own": self.own.result()}


def unbuilt_sequential():
    return keras.Sequential([L.Dense(8, activation="tanh"), L.Dense(3, activation="softmax")])


def with_optional_input():
    one, other = keras.Input((6,)), keras.Input((6,), optional=True)
    return keras.Model([one, other], L.Dense(3, activation="softmax")(AddsIfGiven()([one, other])))


class AddsIfGiven(L.Layer):
    """The sum of two inputs, the second of which may be absent; it has no argument `training`."""

    def call(self, inputs):
        return inputs[0] if inputs[1] is None else inputs[0] + inputs[1]


def test_fit_builds_a_subclass_and_updates_the_metrics_of_its_own():
    pair = build_pair(OwnMetrics, **CLASSIFIER)
    assert not pair.ours.built
    assert_same_fit(pair, rows, batch_size=7, validation_split=0.3)


def test_fit_of_two_inputs_of_which_one_is_absent():
    pair = build_pair(with_optional_input, optimizer=lambda: "sgd", loss=CLASSIFIER["loss"])
    x, y = rows()
    assert_same_fit(pair, lambda: ([x, None], y), batch_size=7)
    theirs, ours = (model.predict((((x, None),) for _ in range(2)), verbose=0) for model in pair)
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)


def test_a_model_and_its_parallel_model_share_variables_and_compile_arguments():
    model, (x, y) = classifier(), rows()
    model.compile(
        keras.optimizers.SGD(0.3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,
    )
    model.fit(x, y, verbose=0)
    parallel = towers.make_parallel(model, 2)
    assert isinstance(parallel, ParallelModel) and isinstance(parallel, keras.Sequential)
    assert parallel is not model and parallel.train_function is None
    assert parallel.optimizer is model.optimizer
    for ours, theirs in zip(parallel.variables, model.variables, strict=True):
        assert ours is theirs
    for trained, other in ((parallel, model), (model, parallel)):
        before = other.get_weights()
        assert list(trained.fit(x, y, verbose=0).history) == ["accuracy", "loss"]
        assert np.any(before[0] != other.get_weights()[0])
        np.testing.assert_allclose(
            other.predict(x, verbose=0), trained.predict(x, verbose=0), rtol=TOLERANCE
        )
    assert int(model.optimizer.iterations) == 3


def test_predict_needs_no_compile_and_builds_the_model_together_with_its_parallel_model():
    model = OwnWeight()
    x, _ = rows()
    parallel = towers.make_parallel(model, 2)
    ours = parallel.predict(x, verbose=0)
    np.testing.assert_allclose(model(x), ours, rtol=TOLERANCE)
    assert len(model.variables) == len(parallel.variables)
    for a, b in zip(parallel.variables, model.variables, strict=True):
        assert a is b


@pytest.mark.telling("compiled")
@pytest.mark.parametrize(
    "first",
    [
        lambda model, parallel, x: model(x),
        lambda model, parallel, x: parallel(x),
        lambda model, parallel, x: parallel.build(x.shape),
        lambda model, parallel, x: (model.compile("sgd", "mse"), model.predict(x, verbose=0)),
    ],
    ids=["model", "parallel", "build", "compiled"],
)
def test_either_may_be_built_before_the_first_batch(first):
    model = unbuilt_sequential()
    parallel = towers.make_parallel(model, 2)
    parallel.compile("adam", "sparse_categorical_crossentropy")
    x, y = rows()
    first(model, parallel, x)
    parallel.fit(x, y, verbose=0)
    assert isinstance(parallel.optimizer, keras.optimizers.Adam)
    assert int(parallel.optimizer.iterations) == 1
    assert parallel.predict_function is None  # and not the model's
    np.testing.assert_allclose(
        model.predict(x, verbose=0), parallel.predict(x, verbose=0), rtol=TOLERANCE
    )
    assert {id(v) for v in model.variables} == {id(v) for v in parallel.variables}


def test_a_parallel_model_can_be_made_parallel_again():
    pair = build_pair(classifier, optimizer=lambda: "sgd", loss=CLASSIFIER["loss"])
    again = towers.make_parallel(towers.make_parallel(pair.ours, 3), 1)
    assert [c.__name__ for c in type(again).__mro__].count("ParallelModel") == 1
    assert_same_fit(pair._replace(ours=again), rows, batch_size=7)


@pytest.mark.parametrize("name", ["train_step", "test_step", "predict_step"])
def test_a_step_set_on_the_instance_is_an_error_that_says_where_it_belongs(name):
    model = classifier()
    setattr(model, name, lambda data: {})
    with pytest.raises(ValueError, match=f"{name} that was set on the instance.*class Own"):
        towers.make_parallel(model, 2)


def test_other_objects_and_models_that_towers_cannot_compute_are_errors():
    with pytest.raises(ValueError, match="must be a keras.Model"):
        towers.make_parallel(L.Dense(3), 2)
    stateful = L.Bidirectional(L.GRU(3, stateful=True))
    stateful = keras.Sequential([keras.Input((5, 4), batch_size=2), stateful])
    with pytest.raises(ValueError, match="is stateful=True: .*Use stateful=False."):
        towers.make_parallel(stateful, 2)
    with pytest.raises(ValueError, match="batch_norm"):
        towers.make_parallel(classifier(), 2, batch_norm="mean")


def test_run_eagerly_has_no_effect_and_a_warning_says_so():
    parallel = towers.make_parallel(classifier(), 2)
    with pytest.warns(UserWarning, match="run_eagerly=True has no effect"):
        parallel.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    assert not parallel.run_eagerly
    assert np.isfinite(parallel.fit(*rows(), verbose=0).history["loss"][0])


def test_variables_on_a_gpu_cause_a_warning(monkeypatch):
    monkeypatch.setattr(state, "variables_device", lambda model: "/gpu:0")
    with pytest.warns(UserWarning, match="tf.device..*/cpu:0") as caught:
        towers.make_parallel(classifier(), 1)
    assert [each.filename for each in caught] == [__file__]


def test_xla_compiles_the_towers_and_never_the_step_around_them(monkeypatch):
    """Around the whole step it would compute all towers on one device."""
    asked = []

    def make_test_function(model, force=False):
        asked.append(model.jit_compile)
        model.test_function = lambda data: {}

    model = classifier()
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    parallel = towers.make_parallel(model, 2)
    monkeypatch.setattr(keras.Model, "make_test_function", make_test_function)
    parallel.make_test_function()
    assert asked == [False] and model.jit_compile and parallel.jit_compile
    assert parallel.get_compile_config()["jit_compile"]  # for the plain model in the file


COMPILED = """
import keras, numpy as np, towers
towers.logical_cpus(2)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
parallel = towers.make_parallel(model, 2, num_towers=4)
parallel.compile("sgd", "mse", jit_compile=True)
x, y = np.ones((33, 6), "float32"), np.ones((33, 3), "float32")
# On two devices 4 4, 3 3; the last batches' 2 1, 1 1 and 2 2, 2 2 run without XLA.
parallel.fit(x, y, batch_size=14, epochs=2, validation_data=(x[:22], y[:22]), verbose=0)
parallel.evaluate(x[:27], y[:27], batch_size=14, verbose=0)  # 4 3, 3 3
parallel.predict(x, batch_size=14, verbose=0)
"""


def test_a_run_compiles_towers_for_the_shard_sizes_of_a_full_batch(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"}
    done = processes.run("-c", COMPILED, cwd=ROOT, environment=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [path.name for path in tmp_path.glob("*.before_optimizations.txt")]
    assert sum("_inference_tower_" in name for name in programs) == 2 * 3
