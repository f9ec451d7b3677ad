"""Any task: what a model was compiled with, data of any structure, from one end to the other."""

import io
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.app.datasets.sources import Rows
from towers.app import run_dir
from towers.app.config import TrainConfig
from towers.resume.epoch import Epoch
from towers.app.diagnosis.describe import describe
from towers.app.reporting.report import Report
from towers.app.training.build import build
from towers.app.training.task import UserObjects

pytestmark = pytest.mark.usefixtures("in_an_empty_directory", "without_charts")
L = keras.layers
NUM_TRAIN, NUM_TEST = 26, 10  # 26 = 3 x 8 + 2
RUN = run_dir.Path("run")


def config(**values):
    """4 steps an epoch."""
    return TrainConfig(**{"num_gpus": 2, "batch_size": 8, "epochs": 2, "run_dir": "run", **values})


def parts(**arrays):
    """(train, test) of each array."""
    return [
        {name: array[:NUM_TRAIN] for name, array in arrays.items()},
        {name: array[NUM_TRAIN:] for name, array in arrays.items()},
    ]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(NUM_TRAIN + NUM_TEST, *shape))


# Regression: one array in float64, one output.
def regression_model():
    model = keras.Sequential([keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae", keras.metrics.R2Score(name="r2")])
    return model


def shaped_regression_model(input_shape, num_classes):
    assert (input_shape, num_classes) == ((3,), None)
    return regression_model()


def uncompiled_model():
    return keras.Sequential([keras.Input((3,)), L.Dense(3, activation="softmax")])


def regression_data():
    x = numbers(3)
    train, test = parts(x=x, y=x.sum(axis=1, keepdims=True))
    return tuple(train.values()), tuple(test.values())


OF_REGRESSION = {
    "model": f"{__name__}:shaped_regression_model",
    "dataset": f"{__name__}:regression_data",
}


# Two outputs, inputs in a dict.
def two_outputs_model():
    a = keras.Input((3,), name="a")
    words = keras.Input((4,), name="words", dtype="int32")
    h = L.Concatenate()([a, L.Flatten()(L.Embedding(5, 2)(words))])
    outputs = {"size": L.Dense(1, name="size")(h), "kind": L.Dense(3, "softmax", name="kind")(h)}
    model = keras.Model({"a": a, "words": words}, outputs)
    model.compile(
        "adam",
        {"size": "mse", "kind": "sparse_categorical_crossentropy"},
        loss_weights={"size": 1.0, "kind": 0.5},
        metrics={"kind": ["accuracy"]},
        weighted_metrics={"size": ["mae"]},
    )
    return model


def two_outputs_data():
    words = np.random.default_rng(1).integers(0, 5, (NUM_TRAIN + NUM_TEST, 4))
    xs = parts(a=numbers(3), words=words)
    ys = parts(size=numbers(1, seed=2), kind=words[:, 0] % 3)
    return list(zip(xs, ys, strict=True))


class AddsItsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(tf.square(x)))
        return x


def header(directory=RUN):
    return (directory / "results.csv").read_text().splitlines()[0]


def test_a_compiled_model_brings_its_loss_its_metrics_and_its_optimizer(capsys):
    history = towers.train(config(**OF_REGRESSION))
    assert header() == (
        "epoch,loss,mae,r2,val_loss,val_mae,val_r2,seconds,examples_per_second,digest"
    )
    final = keras.saving.load_model("run/final.keras")
    assert isinstance(final.optimizer, keras.optimizers.SGD)
    _, (x, y) = regression_data()
    error = y - final(x)
    expected = np.mean(error**2), np.mean(abs(error)), 1 - np.mean(error**2) / np.var(y)
    assert [history[name][-1] for name in ("val_loss", "val_mae", "val_r2")] == pytest.approx(
        expected, rel=1e-5
    )
    said = capsys.readouterr().out
    assert "Task      the model's own, as it was compiled: loss, mae, r2\n" in said
    assert "best by val_loss" in said


def test_flags_replace_the_optimizer_of_a_compiled_model_and_a_line_says_so():
    run = build(config(**OF_REGRESSION, optimizer="rmsprop", learning_rate=0.5))
    assert isinstance(run.step.optimizer, keras.optimizers.RMSprop)
    assert float(run.step.optimizer.learning_rate) == 0.5
    describe(run, Report(shown := io.StringIO()), "run")
    assert "; but optimizer and learning_rate as given beside it" in shown.getvalue()


def test_a_classifier_needs_two_classes():
    data = {"train": (numbers(3), np.zeros(36, int)), "test": (numbers(3), np.zeros(36, int))}
    with pytest.raises(ValueError, match="has one class, and a classifier needs at least two"):
        towers.train(config(), model=uncompiled_model(), **data)
    assert not RUN.exists()


def test_the_steps_are_those_of_keras_own_fit_also_with_sample_weights(float64, capsys):
    """In the same order: one batch an epoch."""

    def make():
        keras.utils.set_random_seed(0)
        return two_outputs_model()

    data, test = two_outputs_data()
    weighted = (*data, np.linspace(0.0, 2.0, NUM_TRAIN))
    expected = (
        make()
        .fit(*weighted[:2], NUM_TRAIN, 3, 0, validation_data=test, sample_weight=weighted[2])
        .history
    )
    given = config(
        batch_size=NUM_TRAIN,
        epochs=3,
        num_towers=2,
        verify_gradients=True,
        monitor="val_kind_accuracy",
    )
    history = towers.train(given, model=make(), train=weighted, test=test)
    assert sorted(history) == sorted(expected) and "val_size_mae" in history
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-9), name
    text = capsys.readouterr().out
    assert "the averaged gradient is the full-batch gradient" in text
    assert "the best by val_kind_accuracy" in text and "best val_kind_accuracy 0." in text


class Jitter(L.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def test_a_model_that_adds_its_loss_needs_no_labels_and_no_validation(capfd):
    """The run of these objects is not resumed without them, nor to the same noise of tf.random."""
    x = numbers(3)
    model = keras.Sequential([keras.Input((3,)), Jitter(), L.Dense(2), AddsItsLoss()])
    model.compile("adam", loss=None)
    history = towers.train(config(), model=model, train=x)
    assert list(history) == ["loss"] and header() == "epoch,loss,seconds,examples_per_second,digest"
    said, err = capfd.readouterr()
    assert "no test examples" in said and "the best by loss" in said
    assert "\n           (best)" in said and "draws noise by tf.random" in said + err
    assert (RUN / "results.png").exists()
    saved = json.loads((RUN / "config.json").read_text())
    assert (saved["model"], saved["dataset"]) == ("python", "python")
    with pytest.raises(ValueError, match=r"model \(python\) is an object .*resume='run'"):
        towers.train(TrainConfig(resume="run"))
    with pytest.raises(ValueError, match=r"dataset \(python\) is an object of the script"):
        towers.train(TrainConfig(resume="run"), model=model)
    with pytest.raises(ValueError, match="the train data are not those"):
        towers.train(TrainConfig(resume="run"), model=model, train=2 * x)


@pytest.mark.parametrize("is_built", [True, False])
def test_a_batched_dataset_is_an_error_that_suggests_unbatch(is_built):
    data = tf.data.Dataset.from_tensor_slices((numbers(3), numbers(1)))
    data = data.batch(4, drop_remainder=not is_built).prefetch(1)
    model = regression_model()
    if not is_built:
        model = keras.Sequential([L.Dense(4, "tanh"), L.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"seem to be batches: .* add .unbatch\(\); `batch_size`"):
        towers.train(config(), model=model, train=data)
    with pytest.raises(ValueError, match="is a PyDataset, which gives batches"):
        towers.train(config(), model=model, train=keras.utils.PyDataset())
    objects = UserObjects(model, data.unbatch())
    assert build(objects.named_in(config()), objects).train.num_examples == 36


def test_a_saved_model_is_trained_further_with_its_optimizer():
    train, _ = regression_data()
    model = regression_model()
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(4)
    model.save("before.keras")
    run = build(config(**{**OF_REGRESSION, "model": "before.keras"}))
    assert run.first_iteration == 4  # what is left out is counted from there
    bias = run.step.model.layers[0].bias
    np.testing.assert_array_equal(bias, model.layers[0].bias)
    run.step.train_batch(*train)
    assert run.step.optimizer.iterations == 5
    assert not np.array_equal(bias, model.layers[0].bias)
    assert set(run.columns) > {"r2", "val_r2"}


def test_a_saved_model_that_is_not_compiled_is_a_classifier():
    uncompiled_model().save("plain.keras")
    labelled = numbers(3), np.arange(NUM_TRAIN + NUM_TEST) % 3
    objects = UserObjects(train=labelled, test=labelled)
    run = build(objects.named_in(config(model="plain.keras")), objects)
    assert [*run.columns] == ["loss", "accuracy", "val_loss", "val_accuracy"]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"precision": "mixed_bfloat16", "model": "m.keras"}, r"precision \(mixed_bfloat16\) has"),
        ({"model": "none.keras"}, r"model \(none.keras\) does not exist"),
        ({"model": "cnn", "dataset": "music"}, r"model=cnn does not take .* of shape \(49,\): "),
    ],
)
def test_values_that_do_not_fit_the_data_are_errors_before_there_is_a_directory(values, message):
    with pytest.raises(ValueError, match=message):
        towers.train(config(**{**OF_REGRESSION, **values}))
    assert not RUN.exists()


def test_labels_that_do_not_fit_the_outputs_are_one_line():
    with pytest.raises(ValueError, match="cannot be trained on these data: ") as error:
        towers.train(config(), model=regression_model(), train=(numbers(3), numbers(2)))
    assert "\n" not in str(error.value)


@pytest.mark.tools
def test_what_the_page_shows_runs(monkeypatch):
    """At another default device, as on a machine with GPUs."""
    page = (run_dir.Path(__file__).parents[3] / "docs/custom_loss.md").read_text()
    module, script = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    run_dir.Path("house.py").write_text(module)
    monkeypatch.syspath_prepend(".")
    with tf.device("/cpu:3"):
        names = {}
        exec(compile(script, "custom_loss.md", "exec"), names)
    assert names["history"]["val_price_mae"][1] < names["history"]["val_price_mae"][0]
    assert names["history"]["val_kind_accuracy"][-1] > 0.9
    columns = header(run_dir.Path("runs/houses")).split(",")
    assert columns[1:6] == ["loss", "kind_accuracy", "price_mae", "price_loss", "kind_loss"]


AUGMENTED = []  # the shapes of the examples that `noise_added` was traced with


def noise_added(x, seed):
    AUGMENTED.append(x["a"].shape)
    return {**x, "a": x["a"] + tf.random.stateless_normal(tf.shape(x["a"]), seed)}


def test_a_task_of_two_outputs_has_the_same_augmented_batches_of_rows_and_arrays():
    def rows(split):
        count = len(split[0]["a"])
        return Rows([tf.nest.map_structure(lambda a, i=i: a[i], split) for i in range(count)])

    def batches(*splits):
        AUGMENTED.clear()
        objects = UserObjects(two_outputs_model(), *splits)
        run = build(objects.named_in(given), objects)
        describe(run, Report(shown), "run")
        found = [
            tf.nest.map_structure(lambda a: a.numpy().tolist(), batch)
            for batch in run.train.batches(Epoch(8, seed=1, number=1))
        ]
        assert AUGMENTED
        return found

    given, shown = config(augment=f"{__name__}:noise_added"), io.StringIO()
    arrays = two_outputs_data()
    assert batches(*arrays) == batches(*map(rows, arrays))
    assert shown.getvalue().count(f"; augmented by {__name__}:noise_added") == 2
