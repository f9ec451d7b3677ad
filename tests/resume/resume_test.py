"""The callback itself: what it is given, and where it works."""

import os
from pathlib import Path

import keras
import pytest

import towers
from tests.parallel.pairs import classifier, rows
from towers.resume.resume import Resume, only_one


@pytest.mark.parametrize("every", [0, -1, 2.5, "3", True])
def test_a_number_of_steps_that_makes_no_sense_is_refused(every, tmp_path):
    with pytest.raises(ValueError, match=r"^every \(.*\) must be an integer of at least 1"):
        towers.Resume(tmp_path, every=every)


def test_a_directory_that_is_no_path_is_refused():
    with pytest.raises(ValueError, match=r"^directory \(None\) must be a path"):
        towers.Resume(None)


def test_a_directory_is_what_it_was_when_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert towers.Resume("~/backup").directory == tmp_path / "backup"
    assert towers.Resume("backup").directory == Path(os.getcwd()) / "backup"


def test_a_plain_model_refuses_it_and_says_how_it_works(tmp_path):
    model = classifier()
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="parallel = towers.make_parallel") as caught:
        model.fit(*rows(7), verbose=0, callbacks=[towers.Resume(tmp_path)])
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
    parallel = towers.make_parallel(classifier(), 2)
    parallel.compile("sgd", "sparse_categorical_crossentropy")
    callbacks = keras.callbacks.CallbackList([towers.Resume(tmp_path)], model=parallel)
    with pytest.raises(ValueError, match="works only in the fit of a parallel model"):
        parallel.fit(*rows(7), verbose=0, callbacks=callbacks)
