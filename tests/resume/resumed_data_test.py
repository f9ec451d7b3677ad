"""The input of a fit that goes on, also one with a state of its own; the callback itself."""

import os
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.parallel import pairs
from tests.parallel.fits import Fits, classifier, rows
from tests.resume import loaders
from towers.app.datasets import batches
from towers.resume.resume import Resume, only_one
from towers.resume.resumed_data import Start, are_arrays, make_data, split_arrays
from towers.resume.stateful import decoded, encoded

X = np.arange(11, dtype="float64")


class Batches(keras.utils.PyDataset):
    """X in batches of 4; reads notes which."""

    def __init__(self):
        super().__init__()
        self.reads, self.ends = [], 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.reads.append(index)
        return (X[4 * index: 4 * index + 4],)

    def on_epoch_end(self):
        self.ends += 1


def dataset():
    return tf.data.Dataset.from_tensor_slices(X).shuffle(11, seed=1).batch(4)


def made(x, start, shuffle=True):
    return make_data(start, x, None, None, 4, shuffle)


def epoch_of(data, epoch):
    """The values of an epoch's batches, as Keras' fit reads them."""
    data.begin_epoch(epoch)
    is_indexed = isinstance(data.x, keras.utils.PyDataset)
    batches = [data.x[i][0] for i in range(data.num_batches)] if is_indexed else data.x
    return [np.ravel(batch).tolist() for batch in batches]


def test_what_is_done_is_not_read():
    start, source = Start(5, epoch=2, step=2), Batches()
    for x in (X, source):
        assert epoch_of(made(x, start), 2)[:2] == [[], []]
    assert len(source.reads) == 2  # for the specs, and the one that is left
    assert source.ends == 2


@pytest.mark.parametrize("shuffle", [True, False])
def test_arrays_come_in_the_order_of_train_py(shuffle):
    data, examples = made(X, Start(5), shuffle), batches.load_examples((X,))
    for epoch in range(2):
        theirs = batches.shuffled_batches(examples, 4, 5, epoch) if shuffle else (
            batches.ordered_batches(examples, 4))
        assert [part.numpy().tolist() for (part,) in theirs] == epoch_of(data, epoch)


@pytest.mark.parametrize("make", [lambda: X, Batches, dataset])
def test_the_batches_of_every_epoch_are_all_of_them_in_another_order(make):
    data = made(make(), Start(5))
    first, second = epoch_of(data, 0), epoch_of(data, 1)
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == X.tolist()
    assert first != second


def test_arrays_keep_their_structure_and_their_types():
    x = {"a": X, "b": [X.astype("int8"), tf.constant(["x"] * 11)]}
    data = make_data(Start(0), x, X, np.ones(11), 4, False)
    spec = data.x.element_spec
    assert (spec[0]["a"].dtype, spec[0]["b"][0].dtype) == (tf.float32, tf.int8)
    assert (spec[0]["b"][1].dtype, len(spec)) == (tf.string, 3)
    assert not [v for v in tf.nest.flatten(spec) if v.shape != [None]]


def test_a_weight_for_several_outputs_is_that_of_each():
    data = make_data(Start(0), X, {"a": X, "b": X}, np.ones(11), 4, False)
    assert set(data.spec[2]) == {"a", "b"}


def test_the_split_of_validation_is_keras_own():
    train, test = split_arrays((X, None, X), 0.25)
    assert train[0].numpy().tolist() == X[:8].tolist()
    assert (test[1], test[2].numpy().tolist()) == (None, X[8:].tolist())
    with pytest.raises(ValueError, match=r"^validation_split \(0.999\) leaves one part of 11"):
        split_arrays((X, None, None), 0.999)


def test_what_differs_is_in_the_identity():
    def identity(x, shuffle=True):
        return made(x, Start(0), shuffle).identity

    assert identity(X) == identity(X.copy())
    for other in (X + 1, X[:10], X.astype("int64")):
        assert identity(other) != identity(X)
    assert identity(X, False) != identity(X)
    assert identity(dataset().take(2)) != identity(dataset())


@pytest.mark.parametrize("x", [[[1.0, 2.0]], None, "text"])
def test_data_without_an_order_are_refused(x):
    assert not are_arrays(x)
    with pytest.raises(ValueError, match=r"^x \(.*\): towers.Resume cannot find its position"):
        made(x, Start(0))


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="^shuffle .'batch'. must be True or False"):
        made(X, Start(0), "batch")
    with pytest.raises(ValueError, match=r"different lengths: \[10, 11\]"):
        make_data(Start(0), X, X[:10], None, 4, True)
    with pytest.raises(ValueError, match="x is a generator that gives no batch"):
        made((x for x in ()), Start(0, epoch=100, steps_per_epoch=2))


STEPS = {"steps_per_epoch": 4, "batch_size": None}


def loader(kind=loaders.Loader, **options):
    """4 batches of 7 examples, shuffled anew in each pass."""
    x, y = rows(28)
    return kind(x.reshape(4, 7, 6), y.reshape(4, 7), **options)


def test_nothing_that_was_trained_on_is_read_again(tmp_path):
    made = []
    fits = Fits(classifier(), lambda: made.append(loader()) or made[-1], **STEPS)
    with pytest.raises(InterruptedError):
        fits.fit(tmp_path, after=3)
    fits.fit(tmp_path)
    assert made[-1].read[:2] == [3, 0]  # the epoch's fourth batch, then the next pass


@pytest.mark.parametrize("options", [
    {}, {"names": ("state_dict", "load_state_dict"), "on_iterator": False},
])
def test_what_is_saved_is_the_state_after_the_last_step(options):
    """Beside what has been read ahead; states of steps that are done are forgotten."""
    def data(done, saved=None):
        start, source = Start(0, steps_per_epoch=4), loader(**options)
        return make_data(start, source, None, None, None, True, done=done, saved=saved)

    steps = [0]
    first = data(lambda: steps[0])
    batches = [next(first.x) for _ in range(3)]
    assert decoded(first.state())["at"] == 0
    steps[0] = 1
    assert decoded(first.state())["at"] == 1
    again = data(lambda: 1, first.state())
    np.testing.assert_array_equal(next(again.x)[0], batches[1][0])
    next(first.x)
    steps[0] = 0
    with pytest.raises(KeyError):
        first.state()


def test_states_come_back_as_they_were():
    state = {"a": [1, 2.5, None, True, "x"], 3: (b"\x00\xff", np.arange(4, dtype="uint8")),
             "big": 2**100}
    found = decoded(encoded(state))
    np.testing.assert_array_equal(found[3][1], state[3][1])
    assert found[3][1].dtype == np.uint8 and found[3][0] == state[3][0]
    assert (found["a"], found["big"]) == (state["a"], state["big"])


@pytest.mark.parametrize("kind, options, error", [
    (loaders.Loader, {}, "give steps_per_epoch"),
    (loaders.Unsaved, STEPS, r"x \(Unsaved\): its get_state\(\) cannot be saved: a set is none"),
])
def test_what_cannot_go_on_is_refused(kind, options, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        classifier().fit(loader(kind), callbacks=[towers.Resume(tmp_path)], **options)


@pytest.mark.parametrize("directory, every, words", [
    (None, 1, r"directory \(None\) must be a path"),
    *((".", every, r"every \(.*\) must be an integer of at least 1")
      for every in (0, -1, 2.5, "3", True)),
])
def test_arguments_of_the_callback_that_make_no_sense_are_refused(directory, every, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        towers.Resume(directory, every=every)


def test_a_directory_is_what_it_was_when_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert towers.Resume("~/backup").directory == tmp_path / "backup"
    assert towers.Resume("backup").directory == Path(os.getcwd()) / "backup"


def test_a_plain_model_refuses_it_and_says_how_it_works(tmp_path):
    model = pairs.classifier()
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="parallel = towers.make_parallel") as caught:
        model.fit(*pairs.rows(7), verbose=0, callbacks=[towers.Resume(tmp_path)])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_it_is_found_among_callbacks_however_they_are_given(tmp_path):
    resume, other = towers.Resume(tmp_path), keras.callbacks.TerminateOnNaN()
    assert only_one(Resume, [other, [resume]]) is resume
    assert only_one(Resume, resume) is resume
    assert only_one(Resume, [other]) is only_one(Resume, None) is None
    with pytest.raises(ValueError, match="only one of them can be a towers.Resume"):
        only_one(Resume, [resume, towers.Resume(tmp_path)])


def test_a_list_of_keras_own_refuses_it(tmp_path):
    parallel = towers.make_parallel(pairs.classifier(), 2)
    parallel.compile("sgd", "sparse_categorical_crossentropy")
    callbacks = keras.callbacks.CallbackList([towers.Resume(tmp_path)], model=parallel)
    with pytest.raises(ValueError, match="works only in the fit of a parallel model"):
        parallel.fit(*pairs.rows(7), verbose=0, callbacks=callbacks)
