"""--evaluate and --predict: the file, and Keras' own values in the order of the data."""

import dataclasses
import io
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import loading
from tests.app.datasets import pixels_test
from tests.app.run_test import measured, small_data
from towers.app.after_training.model_files import USED, class_names, file_config, find_file
from towers.app.after_training import predicting
from towers.app.after_training.predicting import evaluate_file, predict_file, write_predictions
from towers.app.config import TrainConfig
from towers.app.reporting.report import Report
from towers.app.run_dir import write_config
from towers.step.xla import FullBatch

(_, _), (X, Y) = small_data()


def unknown_label():
    """A label that the model does not know."""
    train, (x_test, y_test) = small_data()
    return train, (x_test, np.where(np.arange(len(y_test)) == 3, 7, y_test))


def numbers():
    """The inputs of another task."""
    (x, y), (x_test, y_test) = small_data()
    return (x[:, :2], y), (x_test[:, :2], y_test)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.fixture
def file(model, tmp_path):
    path = tmp_path / "model.keras"
    model.save(path)
    return path


def config(**values):
    """Batches of 7, 7 and 6 on 3 towers."""
    made = {"dataset": "tests.app.run_test:small_data", "num_gpus": 2, "num_towers": 3}
    return TrainConfig(**{**made, "batch_size": 7, "device": "cpu", **values})


@pytest.fixture
def out():
    stream = io.StringIO()
    out = Report(stream)
    out.text = stream.getvalue
    return out


def test_evaluate_is_keras_evaluate_and_reads_these_fields(model, file, out, monkeypatch):
    read, found, given = set(), object.__getattribute__, config()
    with monkeypatch.context() as patch:
        note = lambda self, name: (self is given and read.add(name), found(self, name))[1]  # noqa: E731
        patch.setattr(TrainConfig, "__getattribute__", note)
        logs = evaluate_file(given, file, out)
    # num_towers stands for the first two, two are only checked, config.json is read by the last.
    others = {"accumulate", "towers_per_device", "strategy", "jit_compile", "trust_run_dir"}
    assert read & {field.name for field in dataclasses.fields(TrainConfig)} ^ USED == others
    assert list(logs) == ["loss", "accuracy"]
    assert [*logs.values()] == pytest.approx(measured(model, X, Y), rel=1e-6)
    last = out.text().splitlines()[-1]
    assert last.startswith(f"Evaluate  loss {logs['loss']:.4f}  accuracy {logs['accuracy']:.4f} |")


def test_predict_is_keras_predict_and_shows_how_far_it_is(model, file, out, tmp_path, monkeypatch):
    monkeypatch.setattr(Report, "is_due", lambda self: True)
    sizes = []
    monkeypatch.setattr(predicting, "FullBatch", lambda n: sizes.append(n) or FullBatch(n))
    predict_file(config(), file, str(tmp_path / "p.npz"), out)
    assert sizes == [7]  # XLA would not compile the last batch, of 6
    expected = model(X, training=False)
    found = np.load(tmp_path / "p.npz")["predictions"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert "\nPredict   14/20\nPredict   20/20\n" in out.text()


def picture(path, value, shape=(4, 5, 1)):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tf.io.encode_png(np.full(shape, value, np.uint8)).numpy())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run of two classes of images, bright cats and dark dogs."""
    folder = tmp_path_factory.mktemp("images")
    for name, value in (("cat", 255), ("dog", 1)):
        picture(folder / "train" / name / "0.png", value)
        picture(folder / "val" / name / "0.png", value)
    directory = tmp_path_factory.mktemp("runs")
    trained = TrainConfig(
        dataset="image_folder",
        data_dir=str(folder),
        image_size="4x5x1",
        model="tests.loading:model",
        batch_size=4,
    )
    write_config(directory, trained.to_json(), ["cat", "dog"])
    model = loading.model((4, 5, 1), 2)
    model.layers[-1].set_weights([np.tile([1.0, -1.0], (20, 1)), np.array([-10.0, 10.0])])
    model.save(directory / "final.keras")
    return directory


def rows_of(run, out, tmp_path, **given):
    file = find_file(str(run), "predict")
    config = file_config(file, {"num_gpus": 2, "trust_run_dir": True, **given})
    predict_file(config, file, str(tmp_path / "p.csv"), out)
    return [line.split(",")[:-1] for line in (tmp_path / "p.csv").read_text().splitlines()]


def test_images_get_their_paths_and_their_classes_names(run, out, tmp_path):
    rows = rows_of(run, out, tmp_path)
    assert rows[:2] == [["file", "label", "class"], ["val/cat/0.png", "0", "cat"]]
    (tmp_path / "p.csv").unlink()
    # Without labels: of another size and in color; the folder holds nothing else.
    photos = tmp_path / "photos"
    for name, value in (("b", 250), ("a", 3), ("c", 240)):
        picture(photos / f"{name}.png", value, (8, 9, 3))
    rows = rows_of(run, out, tmp_path, data_dir=str(photos))
    assert rows == [
        ["file", "label", "class"],
        ["a.png", "1", "dog"],
        ["b.png", "0", "cat"],
        ["c.png", "0", "cat"],
    ]
    file = find_file(str(run), "evaluate")
    with pytest.raises(ValueError, match="photos holds no folder, one for each class"):
        config = file_config(file, {"data_dir": str(photos), "trust_run_dir": True})
        evaluate_file(config, file, out)


def test_an_image_that_cannot_be_decoded_is_named_and_nothing_is_left(run, out, tmp_path):
    picture(tmp_path / "photos/a.png", 3)
    (tmp_path / "photos/b.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"b.png cannot be decoded: .* Convert it to PNG, or remo"):
        rows_of(run, out, tmp_path, data_dir=str(tmp_path / "photos"))
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_several_outputs_have_their_names_and_the_files_dtype_policy_stays(out, tmp_path):
    """Half precision, in a process of another policy: float32 in the file."""
    inputs = keras.Input((3,))
    policy = "mixed_bfloat16"
    dense = keras.layers.Dense(4, dtype=policy, name="body")(inputs)
    heads = {
        "a": keras.layers.Dense(3, dtype=policy, name="a")(dense),
        "b": keras.layers.Dense(1, dtype="float32", name="b")(dense),
    }
    model = keras.Model(inputs, heads)
    model.save(tmp_path / "two.keras")
    predict_file(config(), tmp_path / "two.keras", str(tmp_path / "p.npz"), out)
    expected = model(X)
    with np.load(tmp_path / "p.npz") as saved:
        for name in ("a", "b"):
            assert saved[name].dtype == np.float32
            values = tf.cast(expected[name], tf.float32)
            np.testing.assert_allclose(saved[name], values, rtol=2**-7)  # of bfloat16


def test_uint8_images_are_divided_as_in_training_and_that_is_said(out, tmp_path):
    pixels_test.model().save(tmp_path / "m.keras")
    given = config(dataset="tests.app.datasets.pixels_test:splits")
    found = evaluate_file(given, tmp_path / "m.keras", out)
    saved = keras.saving.load_model(tmp_path / "m.keras")
    loss, _ = measured(saved, pixels_test.DIVIDED, pixels_test.LABELS)
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert f"          {pixels_test.SAID}\n" in out.text()


def test_what_cannot_be_evaluated_says_why(file, out, tmp_path):
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]).save(tmp_path / "m.keras")
    numbers = {"dataset": "tests.app.after_training.predicting_test:numbers"}
    for path, values, words in (
        (tmp_path / "m.keras", {}, "the model was saved without a loss; compile"),
        (file, numbers, r"takes inputs of shape \(3,\), and dataset"),
    ):
        with pytest.raises(ValueError, match=rf"^evaluate \(.*\):? {words}"):
            evaluate_file(config(**values), path, out)
    other = config(dataset="tests.app.after_training.predicting_test:unknown_label")
    with pytest.raises(ValueError, match="^a batch of the test examples: .*label value of 7"):
        evaluate_file(other, file, out)


def test_npz_holds_each_output_by_name(tmp_path):
    a, b = np.arange(10.0).reshape(5, 2), np.arange(5, dtype="int32")
    path = tmp_path / "new/p.npz"
    write_predictions(str(path), {"a": a, "file": b})
    with np.load(path) as saved:
        assert sorted(saved) == ["a", "file"] and saved["file"].dtype == b.dtype
        np.testing.assert_array_equal(saved["a"], a)
        np.testing.assert_array_equal(saved["file"], b)
    assert [p.name for p in path.parent.iterdir()] == ["p.npz"]


@pytest.mark.parametrize(
    "files, classes, rows",
    [
        ([], [], ["label,probability", "1,0.9", "0,0.75"]),
        (
            ["a.png", 'b,"c.png'],
            [],
            ["file,label,probability", "a.png,1,0.9", '"b,""c.png",0,0.75'],
        ),
        (
            ["a", "\udcff"],
            ["cat", "dog"],
            ["file,label,class,probability", "a,1,dog,0.9", "\udcff,0,cat,0.75"],
        ),  # a name that is no UTF-8
    ],
)
def test_csv_holds_the_most_probable_label_and_the_names_that_are_known(
    files, classes, rows, tmp_path
):
    path = tmp_path / "p.csv"
    outputs = {"predictions": np.array([[0.1, 0.9], [0.75, 0.25]])}
    write_predictions(str(path), outputs, files, classes)
    assert path.read_text(errors="surrogateescape").splitlines() == rows


@pytest.mark.parametrize(
    "outputs",
    [
        [np.array([[2.0, -1.0]])],
        [np.array([0.5])],
        [np.array([[1.0, 0.0]])] * 2,
    ],
    ids=["logits", "rank", "two outputs"],
)
def test_csv_refuses_other_than_probabilities_and_leaves_nothing(outputs, tmp_path):
    with pytest.raises(ValueError, match="a .csv file takes .* Use a file that ends in .npz"):
        write_predictions(str(tmp_path / "p.csv"), dict(enumerate(outputs)))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_another_kind_and_a_place_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "p.npz").write_text("mine")
    for path, words in ((tmp_path / "p.npz", "exists already"), ("p.txt", "must end in .npz or")):
        with pytest.raises(ValueError, match=rf"^out \(.*\) {words}"):
            predict_file(TrainConfig(), Path("none.keras"), str(path), Report())
    with pytest.raises(ValueError, match=r"^out \(.*\) cannot be used: File exists"):
        write_predictions(str(tmp_path / "p.npz/q.csv"), {})


# The file of a trained model, and what is known of the run that it lies beside
@pytest.fixture
def saved_run(tmp_path):
    config = TrainConfig(
        dataset="npz",
        data_dir="x.npz",
        batch_size=32,
        num_gpus=8,
        num_towers=8,
        cpu_threads=2,
        device="gpu",
        export="there",
        init_from="first.keras",
    )
    (tmp_path / "config.json").write_text(config.to_json())
    (tmp_path / "final.keras").touch()
    return tmp_path


def test_a_directory_stands_for_its_best_or_else_its_final_model_and_others_are_refused(saved_run):
    assert find_file(str(saved_run), "predict") == saved_run / "final.keras"
    (saved_run / "best.keras").touch()
    assert find_file(str(saved_run), "predict") == saved_run / "best.keras"
    assert find_file(str(saved_run / "final.keras"), "predict") == saved_run / "final.keras"
    with pytest.raises(ValueError, match=r"^predict \(.*missing\) is neither a .keras file nor"):
        find_file(str(saved_run / "missing"), "predict")


def test_the_runs_data_and_batch_are_brought_unless_others_are_given(saved_run):
    config = file_config(saved_run / "final.keras", {"num_gpus": 2})
    assert config == TrainConfig(dataset="npz", data_dir="x.npz", batch_size=32, num_gpus=2)
    config = file_config(saved_run / "final.keras", {"dataset": "mnist", "batch_size_per_gpu": 4})
    assert config == TrainConfig(dataset="mnist", batch_size_per_gpu=4)
    alone = file_config(saved_run / "elsewhere/m.keras", {"batch_size": 4})
    assert alone == TrainConfig(batch_size=4)
    of_run = TrainConfig(dataset="image_folder", data_dir="mine", image_size="4x5x3")
    (saved_run / "config.json").write_text(of_run.to_json())
    config = file_config(saved_run / "final.keras", {"data_dir": "other"})
    assert config == TrainConfig(dataset="image_folder", data_dir="other", image_size="4x5x3")


def test_the_names_of_the_runs_classes_are_found_beside_the_file(saved_run):
    assert class_names(saved_run / "final.keras") == []
    write_config(saved_run, "{}", ["cat", "\udcff", "dog"])
    assert class_names(saved_run / "final.keras") == ["cat", "\udcff", "dog"]
    for damaged in ("{}", "[1]", "[" * 100_000):
        (saved_run / "classes.json").write_text(damaged)
        with pytest.raises(ValueError, match="classes.json is no list of the classes' names; rem"):
            class_names(saved_run / "final.keras")
