"""Listeners are told in their order, and of the end in the reverse order."""

import pytest

from tests.results import classifier_result
from towers.app.training.listener import Listener, Listeners

RESULT = classifier_result(1, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0)
LOGS = {"loss": 0.5}
ARGUMENTS = {
    "end_epoch": (RESULT, LOGS), "begin_test_step": (0,), "end_test_step": (0, LOGS),
    "end_test": (LOGS,),
}
MOMENTS = [name for name, value in vars(Listener).items() if callable(value)]


def tell(listener, moment):
    getattr(listener, moment)(*ARGUMENTS.get(moment, ()))


def recorder(name, told):
    """A listener that notes every moment it is told of, whatever moments there are."""
    def note(moment):
        return lambda self, *arguments: told.append((name, moment, *arguments))

    return type("Recorder", (Listener,), {moment: note(moment) for moment in MOMENTS})()


@pytest.mark.parametrize("moment", MOMENTS)
def test_each_moment_reaches_every_listener_in_order(moment):
    told = []
    tell(Listeners([recorder("first", told), recorder("last", told)]), moment)
    arguments = ARGUMENTS.get(moment, ())
    expected = [("first", moment, *arguments), ("last", moment, *arguments)]
    assert told == (expected[::-1] if moment in ("end", "stop") else expected)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_listener_need_not_care_for_a_moment(moment):
    assert tell(Listener(), moment) is None
