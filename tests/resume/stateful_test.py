"""An iterable with a state of its own: a fit goes on at once, with the bits of one never ended."""

import numpy as np
import pytest

import towers
from tests.parallel.fits import Fits, classifier, rows
from towers.resume.plain_state import decoded, encoded
from towers.resume.resumed_data import Start, make_data

STEPS = {"steps_per_epoch": 4, "batch_size": None}


class Loader:
    """Shuffled batches, ragged last ones; its iterator's state is an order and a position.

    first: the index, in an order, of the first batch that each instance has read.
    """

    read: list = []

    def __init__(self, methods=("get_state", "set_state"), on_iterator=True):
        self.x, self.y = rows()
        self.random = np.random.default_rng(5)
        self.order, self.at = None, 0
        for target, name in ((self._state, methods[0]), (self._go_on, methods[1])):
            setattr(self, name if not on_iterator else f"of_iterator_{name}", target)
        self.names, self.on_iterator = methods, on_iterator

    def _state(self):
        return {"order": self.order, "at": self.at, "random": self.random.bit_generator.state}

    def _go_on(self, value):
        self.order, self.at = value["order"], value["at"]
        self.random.bit_generator.state = value["random"]

    def __iter__(self):
        loader = self

        class Batches:
            def __iter__(self):
                return self

            def __next__(self):
                if loader.order is None:
                    loader.order = loader.random.permutation(len(loader.x))
                if loader.at >= len(loader.x):
                    loader.order, loader.at = None, 0
                    raise StopIteration
                chosen = loader.order[loader.at:loader.at + 7]
                Loader.read.append(loader.at)
                loader.at += 7
                return loader.x[chosen], loader.y[chosen]

        if loader.on_iterator:
            for name in loader.names:
                setattr(Batches, name, staticmethod(getattr(loader, f"of_iterator_{name}")))
        return Batches()


@pytest.fixture(scope="module")
def model():
    return classifier()


LOADERS = {
    "iterator": Loader, "itself": lambda: Loader(("state_dict", "load_state_dict"), False),
}


@pytest.mark.telling("iterator-?2, 3, 2?")
@pytest.mark.parametrize("ends", [[1], [2, 3, 2], [4], [5]], ids=str)
@pytest.mark.parametrize("name", LOADERS)
def test_a_fit_that_was_ended_goes_on_to_the_same_bits(model, name, ends, tmp_path):
    fits = Fits(model, LOADERS[name], **STEPS)
    whole = fits.fit(tmp_path / "whole")
    assert fits.interrupted(tmp_path / "ended", ends) == whole


def test_nothing_that_was_trained_on_is_read_again(model, tmp_path):
    fits = Fits(model, Loader, **STEPS)
    with pytest.raises(InterruptedError):
        fits.fit(tmp_path, after=3)
    Loader.read = []
    fits.fit(tmp_path)
    assert Loader.read[:2] == [21, 0]  # the epoch's fourth batch, then the next pass


def test_what_is_saved_is_the_state_after_the_last_step():
    """Beside what has been read ahead; states of steps that are done are forgotten."""
    steps = [0]
    start = Start(0, steps_per_epoch=4)
    data = make_data(start, Loader(), None, None, None, True, done=lambda: steps[0])
    batches = [next(data.x) for _ in range(3)]
    assert decoded(data.state())["at"] == 0
    steps[0] = 1
    assert decoded(data.state())["at"] == 7
    again = make_data(
        start, Loader(), None, None, None, True, done=lambda: 1, saved=data.state()
    )
    np.testing.assert_array_equal(next(again.x)[0], batches[1][0])


def test_states_come_back_as_they_were():
    state = {"a": [1, 2.5, None, True, "x"], 3: (b"\x00\xff", np.arange(4, dtype="uint8")),
             "big": 2**100}
    found = decoded(encoded(state))
    np.testing.assert_array_equal(found[3][1], state[3][1])
    assert found[3][1].dtype == np.uint8 and found[3][0] == state[3][0]
    assert (found["a"], found["big"]) == (state["a"], state["big"])
    with pytest.raises(ValueError, match="a set is none of numbers"):
        encoded({"a": {1}})


class Bad(Loader):
    """Its state is of a kind that cannot be saved."""

    def _state(self):
        return {1, 2}


@pytest.mark.parametrize("loader, options, error", [
    (Loader, {}, "give steps_per_epoch"),
    (Bad, STEPS, r"Bad.*get_state\(\) cannot be saved: a set is none"),
])
def test_what_cannot_go_on_is_refused(model, loader, options, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        model.fit(loader(), callbacks=[towers.Resume(tmp_path)], **options)
