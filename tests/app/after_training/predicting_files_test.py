"""Files of predictions: there when they are complete."""

from pathlib import Path

import numpy as np
import pytest

from towers.app.after_training.predicting import predict_file, write_predictions
from towers.app.config import TrainConfig
from towers.app.reporting.report import Report


def test_npz_holds_each_output_by_name(tmp_path):
    a, b = np.arange(10.0).reshape(5, 2), np.arange(5, dtype="int32")
    path = tmp_path / "new" / "p.npz"
    write_predictions(str(path), {"a": a, "file": b})
    with np.load(path) as saved:
        assert sorted(saved) == ["a", "file"] and saved["file"].dtype == b.dtype
        np.testing.assert_array_equal(saved["a"], a)
        np.testing.assert_array_equal(saved["file"], b)
    assert [p.name for p in path.parent.iterdir()] == ["p.npz"]


@pytest.mark.parametrize("files, classes, rows", [
    ([], [], ["label,probability", "1,0.9", "0,0.75"]),
    (["a.png", 'b,"c.png'], [], ["file,label,probability", "a.png,1,0.9", '"b,""c.png",0,0.75']),
    ([], ["cat"], ["label,class,probability", "1,,0.9", "0,cat,0.75"]),  # two outputs, one class
    (["a", "\udcff"], ["cat", "dog"], ["file,label,class,probability", "a,1,dog,0.9",
                                       "\udcff,0,cat,0.75"]),  # a name that is no UTF-8
])
def test_csv_holds_the_most_probable_label_and_the_names_that_are_known(
    files, classes, rows, tmp_path
):
    path = tmp_path / "p.csv"
    outputs = {"predictions": np.array([[0.1, 0.9], [0.75, 0.25]])}
    write_predictions(str(path), outputs, files, classes)
    assert path.read_text(errors="surrogateescape").splitlines() == rows


@pytest.mark.parametrize("outputs", [
    [np.array([[2.0, -1.0]])], [np.array([[0.3, 0.3]])], [np.array([0.5])],
    [np.array([[1.0, 0.0]])] * 2,
], ids=["logits", "sums", "rank", "two outputs"])
def test_csv_refuses_other_than_probabilities_and_leaves_nothing(outputs, tmp_path):
    with pytest.raises(ValueError, match="a .csv file takes .* Use a file that ends in .npz"):
        write_predictions(str(tmp_path / "p.csv"), dict(enumerate(outputs)))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_another_kind_and_a_place_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "p.npz").write_text("mine")
    for path, words in ((tmp_path / "p.npz", "exists already"), ("p.txt", "must end in .npz or")):
        with pytest.raises(ValueError, match=rf"^out \(.*\) {words}"):
            predict_file(TrainConfig(), Path("none.keras"), str(path), Report())
    with pytest.raises(ValueError, match=r"^out \(.*\) cannot be written: File exists"):
        write_predictions(str(tmp_path / "p.npz" / "q.csv"), {})
