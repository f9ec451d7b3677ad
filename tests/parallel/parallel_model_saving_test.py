"""Whatever Keras writes of a parallel model is the plain model, however often."""

import copy
import functools
import json
import os
import pickle
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import processes
from tests.conformance.cases import ODD
from tests.parallel.pairs import assert_close, classifier, rows
from tests.parallel.parallel_model_test import Subclassed
from towers.machine.keras_internals import all_layers
from towers.parallel.parallel_model import ParallelModel

L = keras.layers


def functional():
    return {case.name: case for case in ODD}["two_outputs"].build()


def subclassed():
    model = Subclassed()
    model(np.zeros((1, 6), "float32"))
    return model


BUILDS = [classifier, functional, subclassed]


@functools.cache
def trained(build):
    """(the model, its parallel model) after two updates of Adam, which saving them leaves so."""
    keras.utils.set_random_seed(3)
    model = build()
    parallel = towers.make_parallel(model, 2)
    parallel.compile("adam", "mse")
    x, y = inputs(parallel), parallel.predict(inputs(parallel), verbose=0)
    parallel.fit(x, tf.nest.map_structure(lambda v: v + 1, y), batch_size=4, verbose=0)
    return model, parallel


def inputs(model):
    rng = np.random.default_rng(0)
    shapes = [(6,)] if len(getattr(model, "inputs", [0])) == 1 else [(6,), (4,)]
    arrays = [rng.normal(size=(8, *shape)).astype("float32") for shape in shapes]
    return arrays[0] if len(arrays) == 1 else arrays


def content(path):
    """(the model's configuration, the names and sizes of the files) in a .keras file."""
    with zipfile.ZipFile(path) as archive:
        files = sorted((entry.filename, entry.file_size) for entry in archive.infolist())
        return json.loads(archive.read("config.json")), files


def outputs(model, x):
    return [np.array(v) for v in tf.nest.flatten(model.predict(x, verbose=0))]


@pytest.mark.telling("subclassed")
@pytest.mark.parametrize("build", BUILDS)
def test_the_file_is_that_of_the_plain_model(build, tmp_path):
    model, parallel = trained(build)
    parallel.save(tmp_path / "parallel.keras")
    loaded = keras.models.load_model(tmp_path / "parallel.keras")
    assert not isinstance(loaded, ParallelModel)
    assert type(loaded) is parallel.__class__
    assert int(loaded.optimizer.iterations) == 2
    found, expected = (
        [v.numpy() for v in [*m.weights, *m.optimizer.variables]] for m in (loaded, parallel)
    )
    np.testing.assert_equal(found, expected)
    model.compile(parallel.optimizer, "mse")
    model.save(tmp_path / "plain.keras")
    assert content(tmp_path / "parallel.keras") == content(tmp_path / "plain.keras")


LOAD = """
import sys, keras, numpy as np
model = keras.models.load_model(sys.argv[1])
model.run_eagerly = True
x = [np.ones((3, 6), "float32"), np.ones((3, 4), "float32")]
y = model.predict(x, verbose=0)
np.savez(sys.argv[2], *y)
assert "towers" not in sys.modules
print(*model.fit(x, y, verbose=0).history)
"""


def test_the_file_loads_without_towers(tmp_path):
    """And has the parallel model's compile arguments."""
    _, parallel = trained(functional)
    parallel.save(tmp_path / "model.keras")
    done = processes.run(
        "-c",
        LOAD,
        tmp_path / "model.keras",
        tmp_path / "y.npz",
        cwd=tmp_path,
        environment={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    x = [np.ones((3, 6), "float32"), np.ones((3, 4), "float32")]
    with np.load(tmp_path / "y.npz") as found:
        assert_close(found.values(), outputs(parallel, x), 1e-6)
    assert done.stdout.split() == [*parallel.history.history]


@pytest.mark.telling("subclassed")
@pytest.mark.parametrize("build", BUILDS)
def test_saving_loading_and_wrapping_again_changes_nothing(build, tmp_path):
    trained(build)[1].save(tmp_path / "first.keras")
    model = keras.models.load_model(tmp_path / "first.keras")  # Keras shares fewer objects in it
    seen = set()
    for i in range(5):
        path = tmp_path / f"{i}.keras"
        model.save(path)
        layers = tuple(layer.name for layer in all_layers(model))
        configuration, files = content(path)
        seen.add((layers, str(files), json.dumps(configuration["config"])))
        model = towers.make_parallel(keras.models.load_model(path), 2)
        model = towers.make_parallel(model, 1 + i % 3)
    assert len(seen) == 1


@pytest.mark.telling("subclassed")
@pytest.mark.parametrize("build", BUILDS)
def test_weights_files_pass_between_the_parallel_and_the_plain_model(build, tmp_path):
    (_, parallel), plain = trained(build), build()
    parallel.save_weights(tmp_path / "p.weights.h5")
    plain.load_weights(tmp_path / "p.weights.h5")
    x = inputs(parallel)
    assert_close(outputs(parallel, x), outputs(plain, x), 1e-5)
    plain.set_weights([w + 1 for w in plain.get_weights()])
    plain.save_weights(tmp_path / "q.weights.h5")
    parallel.load_weights(tmp_path / "q.weights.h5")
    assert_close(outputs(parallel, x), outputs(plain, x), 1e-5)


@pytest.mark.parametrize("build", BUILDS)
def test_names_summary_and_config_are_the_models(build):
    model = build()
    parallel = towers.make_parallel(model, 2)
    for attribute in ("name", "output_names", "input_names"):
        assert getattr(parallel, attribute, None) == getattr(model, attribute, None)
    assert parallel.layers == model.layers
    assert parallel.count_params() == model.count_params()
    assert parallel.get_config() == model.get_config()
    serialize, lines = keras.saving.serialize_keras_object, ([], [])
    assert serialize(parallel) == serialize(model)
    for each, own in zip((parallel, model), lines):
        each.summary(print_fn=own.append)
    assert lines[0] == lines[1]
    assert parallel.to_json() == model.to_json()


@pytest.mark.telling("functional")
@pytest.mark.parametrize("build", BUILDS)
def test_clone_model_copy_and_pickle_give_plain_models(build):
    _, parallel = trained(build)
    x = inputs(parallel)
    clone = keras.models.clone_model(parallel)
    assert type(clone) is parallel.__class__
    clone(x)
    assert [w.shape for w in clone.weights] == [w.shape for w in parallel.weights]
    with pytest.warns(UserWarning, match="is the plain model.* Call towers.make_parallel"):
        pickled = pickle.dumps(parallel)
    with pytest.warns(UserWarning, match="a copy or a pickle of parallel model"):
        copied = copy.deepcopy(parallel)
    for made in (pickle.loads(pickled), copied):
        assert type(made) is parallel.__class__
        assert_close(outputs(parallel, x), outputs(made, x), 1e-5)


@pytest.mark.telling("functional")
@pytest.mark.parametrize("build", BUILDS)
def test_export_serves_the_model(build, tmp_path):
    _, parallel = trained(build)
    parallel.export(tmp_path / "served", verbose=False)
    x = inputs(parallel)
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    assert_close(outputs(parallel, x), tf.nest.flatten(loaded.serve(x)), 1e-5)


def test_a_parallel_model_is_a_layer_of_a_larger_model():
    parallel = towers.make_parallel(classifier(), 2)
    outer = keras.Sequential([keras.Input((6,)), parallel, L.Dense(1)])
    assert outer.predict(rows()[0], verbose=0).shape == (31, 1)
    outer = towers.make_parallel(outer, 2)
    outer.compile("sgd", "mse")
    outer.fit(rows()[0], rows()[1], verbose=0)


@pytest.mark.matrix
def test_a_tensorflow_checkpoint_restores_the_model(tmp_path):
    _, parallel = trained(classifier)
    path = tf.train.Checkpoint(model=parallel).save(str(tmp_path / "checkpoint"))
    other = classifier()
    tf.train.Checkpoint(model=other).restore(path).expect_partial()
    np.testing.assert_equal(other.get_weights(), parallel.get_weights())
