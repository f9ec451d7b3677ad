"""An iterable with a state of its own, in a fit; interrupted_test has the bits of what goes on."""

import numpy as np
import pytest

import towers
from tests.app.datasets import loaders
from tests.parallel.fits import Fits, classifier, rows
from towers.resume.resumed_data import Start, make_data
from towers.resume.stateful import decoded, encoded

STEPS = {"steps_per_epoch": 4, "batch_size": None}


def loader(kind=loaders.Loader):
    """4 batches of 7 examples, shuffled anew in each pass."""
    x, y = rows(28)
    return kind(x.reshape(4, 7, 6), y.reshape(4, 7))


def test_nothing_that_was_trained_on_is_read_again(tmp_path):
    made = []
    fits = Fits(classifier(), lambda: made.append(loader()) or made[-1], **STEPS)
    with pytest.raises(InterruptedError):
        fits.fit(tmp_path, after=3)
    fits.fit(tmp_path)
    assert made[-1].read[:2] == [3, 0]  # the epoch's fourth batch, then the next pass


def test_what_is_saved_is_the_state_after_the_last_step():
    """Beside what has been read ahead; states of steps that are done are forgotten."""
    def data(done, saved=None):
        start = Start(0, steps_per_epoch=4)
        return make_data(start, loader(), None, None, None, True, done=done, saved=saved)

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
