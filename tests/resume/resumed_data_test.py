"""The input of a fit that goes on, also one with a state of its own; the callback itself."""

import os
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.parallel import pairs
from tests.parallel.fits import Batches, Fits, rows
from tests.resume import loaders
from towers.resume.replay import Replay
from towers.resume.resume import Resume, only_one
from towers.resume.resumed_data import train_data
from towers.resume.resumed_fit import fit_arguments
from towers.resume.stateful import Repeated, decoded, encoded

X = np.arange(11, dtype="float64")


@pytest.fixture(scope="module")
def model():
    return loaders.classifier()


def dataset():
    return tf.data.Dataset.from_tensor_slices(X).shuffle(11, seed=1).batch(4)


def made(x, seed=5, saved=None, **options):
    arguments = fit_arguments(x, batch_size=4, **options)
    return train_data(arguments, Replay(0), seed, saved=saved)


def orders(data):
    """The elements that three iterators give."""
    found = []
    for number in (1, 2, 3):
        data.begin_pass(number)
        found.append([np.ravel(batch).tolist() for batch in data.x.get_tf_dataset()])
    return found


def test_what_is_done_is_not_read(model, tmp_path):
    made = []
    fits = Fits(model, lambda: made.append(Batches()) or made[-1], batch_size=None)
    with pytest.raises(InterruptedError):
        fits.fit(tmp_path, after=6)
    fits.fit(tmp_path)
    first, second = (each.reads for each in made)
    assert first[:2] == second[:2] == [0, 1]  # Keras looks at their shapes
    assert sorted(first[6:8] + second[2:]) == [0, 1, 2, 3]


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_arrays_of_a_script_without_a_seed_are_shuffled_by_one_that_is_saved(shuffle, without_seed):
    data = made(X, shuffle=shuffle)
    found = orders(data)
    assert [sorted(sum(order, [])) for order in found] == [X.tolist()] * 3
    assert len({str(order) for order in found}) == 3
    # Directories that exist hold fits in these orders.
    first = [3, 0, 1, 2] if shuffle == "batch" else [3, 8, 10, 7]
    assert found[0][0] == first
    assert orders(made(X, shuffle=shuffle, seed=6)) != found
    again = made(X, shuffle=shuffle, seed=6, saved=data.state())
    assert orders(again) == found


def test_what_differs_is_in_the_identity():
    def identity(x, **options):
        return made(x, **options).identity

    assert identity(X) == identity(X.copy())
    for other in (X + 1, X[:10], X.astype("int64")):
        assert identity(other) != identity(X)
    assert identity(X, shuffle=False) != identity(X)
    assert identity(X, y=X) != identity(X)
    for other in (dataset().take(2), dataset().unbatch().shuffle(11, seed=2).batch(4)):
        assert identity(other) != identity(dataset())


def test_data_without_an_order_are_refused():
    with pytest.raises(ValueError, match=r"^x \(str\): towers.Resume cannot find its position"):
        made("text")


STEPS = {"steps_per_epoch": 4, "batch_size": None}


def loader(kind=loaders.Loader, **options):
    """4 batches of 7 examples, shuffled anew in each pass."""
    x, y = rows(28)
    return kind(x.reshape(4, 7, 6), y.reshape(4, 7), **options)


def test_nothing_that_was_trained_on_is_read_again(model, tmp_path):
    made = []
    fits = Fits(model, lambda: made.append(loader()) or made[-1], **STEPS)
    with pytest.raises(InterruptedError):
        fits.fit(tmp_path, after=3)
    fits.fit(tmp_path)
    assert made[-1].read[:2] == [3, 0]  # the epoch's fourth batch, then the next pass


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"names": ("state_dict", "load_state_dict"), "on_iterator": False},
    ],
)
def test_what_is_saved_is_the_state_after_the_last_step(options):
    """Beside what has been read ahead; states of steps that are done are forgotten."""
    first, batches = Repeated(loader(**options), "x"), []
    for since in (0, 0, 1):
        batches.append(next(first))
        first.note(since)
    assert decoded(first.saved(1))["at"] == 1
    again = Repeated(loader(**options), "x", 1, first.saved(1))
    np.testing.assert_array_equal(next(again)[0], batches[1][0])
    with pytest.raises(KeyError):
        first.saved(0)


def test_states_come_back_as_they_were():
    state = {
        "a": [1, 2.5, None, True, "x"],
        3: (b"\x00\xff", np.arange(4, dtype="uint8")),
        "big": 2**100,
    }
    found = decoded(encoded(state))
    np.testing.assert_array_equal(found[3][1], state[3][1])
    assert found[3][1].dtype == np.uint8 and found[3][0] == state[3][0]
    assert (found["a"], found["big"]) == (state["a"], state["big"])


@pytest.mark.parametrize(
    "kind, options, error",
    [
        (loaders.Loader, {}, "give steps_per_epoch"),
        (
            loaders.Unsaved,
            STEPS,
            r"x \(Unsaved\): its get_state\(\) cannot be saved: a set is none",
        ),
    ],
)
def test_what_cannot_go_on_is_refused(model, kind, options, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        model.fit(loader(kind), callbacks=[towers.Resume(tmp_path)], **options)


@pytest.mark.parametrize(
    "directory, every, words",
    [
        (None, 1, r"directory \(None\) must be a path"),
        *(
            (".", every, r"every \(.*\) must be an integer of at least 1")
            for every in (0, 2.5, True)
        ),
    ],
)
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


def test_a_list_of_keras_own_refuses_it(model, tmp_path):
    callbacks = keras.callbacks.CallbackList([towers.Resume(tmp_path)], model=model)
    with pytest.raises(ValueError, match="works only in the fit of a parallel model"):
        model.fit(*rows(7), verbose=0, callbacks=callbacks)
