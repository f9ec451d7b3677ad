"""results.csv and results.png; models are the best's, finite and whole; TensorBoard's log."""

import math
import os
import resource
import struct
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import towers
from tests.app.run_test import config, small_model
from towers.app.config import TrainConfig
from towers.app.reporting import charts, run_files
from towers.app.reporting.charts import draw_curves, figure_file
from towers.app.reporting.run_files import RunFiles, save_model, TensorBoardLog, unreadable
from towers.app.monitor import Monitor
from towers.resume.train_state import TrainState
from towers.step.errors import NonFiniteError

pytestmark = pytest.mark.usefixtures("in_an_empty_directory", "without_charts")


@pytest.fixture
def model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def files_of(model, directory, train_state):
    columns = ["loss", "accuracy", "val_loss", "val_accuracy"]
    step = SimpleNamespace(model=model)
    run = SimpleNamespace(step=step, columns=columns, monitor=Monitor(), config=TrainConfig())
    return RunFiles(run, directory, train_state, pytest.fail)


def bias(path):
    return float(keras.saving.load_model(path).weights[1].numpy()[0])


def test_values_that_are_not_finite_are_not_saved(model, tmp_path):
    path = tmp_path / "final.keras"
    save_model(model, path)
    model.weights[1].assign([np.inf])
    with pytest.raises(NonFiniteError, match=f"^{path} is not written: the model holds NaN or inf"):
        save_model(model, path)
    assert bias(path) == 0


def test_a_model_with_a_weight_of_integers_is_saved(tmp_path):
    normalization = keras.layers.Normalization()  # counts in int64
    normalization.adapt(np.array([[1.0, 2.0], [3.0, 6.0]]))
    model = keras.Sequential([keras.Input((2,)), normalization, keras.layers.Dense(1)])
    assert "int" in {weight.dtype[:3] for weight in model.weights}
    save_model(model, tmp_path / "final.keras")
    read = keras.saving.load_model(tmp_path / "final.keras")
    for theirs, ours in zip(read.weights, model.weights, strict=True):
        np.testing.assert_array_equal(theirs, ours)


class Unregistered(keras.layers.Layer):
    """Keras can write it, and not read it back."""

    def call(self, x):
        return x


class WithoutConfig(keras.layers.Layer):
    """Keras cannot write it."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return x


@keras.saving.register_keras_serializable("run_files_test")
class Registered(Unregistered):
    """Keras can write it and read it back."""


def unregistered_loss(y, p):
    return keras.ops.mean((y - p) ** 2, axis=-1)


def compiled(layer, loss="mse"):
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    model.compile("adam", loss, metrics=["mae"])
    return model


@pytest.mark.parametrize(
    "make, unknown",
    [
        (lambda: compiled(Registered()), None),
        (lambda: compiled(Unregistered()), "class Unregistered"),
        (lambda: compiled(keras.layers.Lambda(lambda x: 2 * x)), "a lambda"),
        (lambda: compiled(Registered(), unregistered_loss), "function unregistered_loss"),
    ],
)
@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_a_file_that_keras_cannot_read_back_is_told_before(make, unknown, tmp_path):
    model = make()
    line = unreadable(model)
    save_model(model, tmp_path / "final.keras")
    if unknown is None:
        assert line == ""
        keras.saving.load_model(tmp_path / "final.keras")
    else:
        assert f"does not know {unknown}:" in line
        with pytest.raises((TypeError, ValueError)):
            keras.saving.load_model(tmp_path / "final.keras")


def test_a_model_that_keras_cannot_write_is_refused_with_the_layers_class():
    inner = keras.Sequential([keras.Input((2,)), WithoutConfig(object(), name="mine")])
    said = r"model \(sequential.*\) cannot be saved: .*WithoutConfig.*get_config\(\)"
    with pytest.raises(ValueError, match=said) as error:
        unreadable(compiled(inner))
    assert "\n" not in str(error.value)


@keras.saving.register_keras_serializable("run_files_test")
class Forgetful(keras.layers.Layer):
    """Keras writes its file and reads it back without an error, and without its variable."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], name="scale", initializer="random_normal")

    def call(self, x):
        return x * self.scale

    def save_own_variables(self, store):
        pass

    def load_own_variables(self, store):
        pass


@keras.saving.register_keras_serializable("run_files_test")
class Unbuildable(Registered):
    """Keras writes its configuration, which its class does not take."""

    def get_config(self):
        return {**super().get_config(), "other": 1}


@pytest.mark.parametrize(
    "layer, said",
    [
        (Forgetful, r"reads other values from it for sequential\w*/mine/scale\."),
        (Unbuildable, "cannot read it back: .*arguments.* Unbuildable: {'other'"),
    ],
)
def test_a_final_model_that_keras_reads_with_other_weights_is_an_error(layer, said, tmp_path):
    model = keras.Sequential([keras.Input((2,)), layer(name="mine"), keras.layers.Dense(1)])
    (tmp_path / "final.keras").write_text("old")
    files = files_of(model, tmp_path, TrainState())
    with pytest.raises(ValueError, match=rf"^final.keras is not written: Keras {said}") as error:
        files.save_final()
    assert not files.has_final and os.listdir(tmp_path) == ["final.keras"]
    assert (tmp_path / "final.keras").read_text() == "old" and "\n" not in str(error.value)


def forgetful_model(input_shape, num_classes):
    return small_model(input_shape, num_classes, Forgetful(name="mine"))


def test_a_run_is_done_only_if_its_final_model_can_be_read_back(capsys, monkeypatch):
    values = config(model=f"{__name__}:forgetful_model", run_dir="run", epochs=1)
    with pytest.raises(
        ValueError, match=r"final.keras is not written: .*/mine/scale\. .*--resume=\S*run "
    ):
        towers.train(values)
    assert "Trained: 1 epoch in" in capsys.readouterr().out
    assert not os.path.exists("run/final.keras")
    # The corrected class: the resumed run trains nothing more, and writes the file.
    monkeypatch.delattr(Forgetful, "save_own_variables")
    monkeypatch.delattr(Forgetful, "load_own_variables")
    towers.train(config(resume="run", model=values.model, epochs=1))
    assert "Done: 1 epoch in" in capsys.readouterr().out
    assert os.path.exists("run/final.keras")


def row(epoch):
    return [epoch, 0.5, 0.25, 0.5, 0.25, 12.0, 3912.5, "1a2b3c4d"]


def epochs(path):
    return [line.split(",")[0] for line in (path / "results.csv").read_text().splitlines()]


def test_each_epoch_adds_a_row_and_those_after_the_checkpoint_are_dropped(model, tmp_path):
    (tmp_path / "results.csv").write_text("epoch\n1\n2\n3\n")
    state = TrainState(results=[row(1)])
    file = files_of(model, tmp_path, state)
    file.on_train_begin()
    assert epochs(tmp_path) == ["epoch", "1"]
    state.step = 8
    state.results.append(row(2))
    file.on_epoch_end(1)
    assert epochs(tmp_path) == ["epoch", "1", "2"]
    state.results.clear()
    file.on_train_begin()
    assert not (tmp_path / "results.csv").exists()


def test_the_curves_are_drawn_during_the_run_but_not_after_each_short_epoch(
    model, tmp_path, monkeypatch
):
    now, drawn = 0.0, []
    monkeypatch.setattr(run_files, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(charts, "draw_curves", lambda path, columns, *_: drawn.append(now))
    file = files_of(model, tmp_path, TrainState(step=1, results=[row(1)]))
    for now in range(0, 100, 7):
        file.on_epoch_end(0)
    assert drawn == [35, 70]


def read(directory):
    log = EventAccumulator(str(directory), size_guidance={"tensors": 0})  # 0: all
    log.Reload()
    return log


def values_of(directory, tag):
    return [
        (event.step, float(tf.make_ndarray(event.tensor_proto)))
        for event in read(directory).Tensors(tag)
    ]


def test_a_runs_epochs_are_in_the_log_with_their_values(tmp_path):
    history = towers.train(config(run_dir="run", tensorboard=True))
    log = tmp_path / "run/tensorboard"
    for part, prefix in ("train", ""), ("validation", "val_"):
        for name in "loss", "accuracy":
            steps, found = zip(*values_of(log / part, f"epoch_{name}"), strict=True)
            assert steps == (0, 1)
            np.testing.assert_allclose(found, history[prefix + name], rtol=1e-6)


def test_a_full_disk_is_one_warning_in_a_fit_too(tmp_path):
    warnings = []
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    parallel = towers.make_parallel(model, 2)
    parallel.compile("sgd", "mse")
    log = TensorBoardLog(tmp_path, warnings.append)
    with largest_file(0):
        parallel.fit(np.ones((4, 3)), np.ones((4, 1)), epochs=3, callbacks=[log], verbose=0)
    (warning,) = warnings
    assert f"{tmp_path} cannot be written any more" in warning and "training continues" in warning


def test_a_missing_package_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match="`tensorboard` needs .*pip install 'tf-towers"):
        towers.train(config(tensorboard=True))


@contextmanager
def largest_file(size):
    """The system refuses to write files beyond `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Charts
@pytest.mark.parametrize(
    "columns, values",
    [
        (["loss"], []),
        (["loss", "val_loss"], [0.1, math.nan, -math.inf]),
        (["loss", "accuracy", "b", "c", "val_loss", "val_accuracy"], [0.01 * k for k in range(99)]),
    ],
)
def test_curves_are_drawn_for_any_epochs_and_columns(columns, values, tmp_path):
    shown = dict.fromkeys(columns, values) if values else {}
    draw_curves(tmp_path / "results.png", shown, "a run", Monitor(columns[-1]))
    assert os.listdir(tmp_path) == (["results.png"] if values else [])


def test_each_metric_has_a_chart_which_marks_the_best_epoch_and_leaves_gaps(tmp_path):
    maes = [1, 2, 3]
    rows = {"loss": [0.5] * 3, "mae": maes, "val_loss": [3.0, math.nan, 0.01], "val_mae": maes}
    with mock.patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as savefig:
        draw_curves(tmp_path / "results.png", rows, "a run", Monitor("val_loss", highest=False))
    loss, mae = savefig.call_args.args[0].axes
    assert (loss.get_yscale(), mae.get_yscale()) == ("log", "linear")
    training, validation, best = loss.lines
    assert list(training.get_ydata()) == [0.5] * 3
    assert [math.isnan(y) for y in validation.get_ydata()] == [False, True, False]
    assert best.get_label() == "best, epoch 3: 0.01"
    assert mae.lines[-1].get_label() == "best, epoch 3: 3"


def test_a_picture_has_its_words_and_120_pixels_an_inch(tmp_path):
    with figure_file(tmp_path / "a.png", 4.0, 2.5, "a title", "a note") as figure:
        figure.subplots().plot([1, 2], [3, 4])
    assert (figure.get_suptitle(), figure.get_supxlabel()) == ("a title", "a note")
    content = (tmp_path / "a.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (480, 300)  # its header's first two numbers
