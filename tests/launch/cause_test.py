"""Which worker's end explains the others'."""

import pytest

from towers.launch.cause import End, by_weight, cause, in_words, lost_worker


@pytest.mark.parametrize("ends, expected", [
    ([End(0, 0), End(1, 0)], None),
    # the first that failed by itself
    ([End(1, 1), End(0, 1)], End(1, 1)),
    ([End(1, -9), End(0, 1)], End(1, -9)),
    ([End(0, 0), End(1, 5)], End(1, 5)),
    # who has lost another explains nothing
    ([End(0, 3), End(1, 1), End(2, 3)], End(1, 1)),
    ([End(0, 3), End(2, 3), End(1, -11)], End(1, -11)),
    # unless nobody else failed, or only when he was asked to end
    ([End(2, 3), End(0, 3)], End(2, 3)),
    ([End(2, 3), End(1, -9, told=True, killed=True)], End(2, 3)),
    ([End(2, 3), End(1, -15, told=True)], End(2, 3)),
    ([End(2, 3), End(1, 1, told=True)], End(1, 1, told=True)),
    # of a mistake that all have found, the chief's words
    ([End(2, 2), End(0, 2), End(1, 143, told=True)], End(0, 2)),
    ([End(2, 2), End(0, 1)], End(2, 2)),
    # one was stopped, and with it all; unless one of them failed
    ([End(1, 143), End(0, 143)], End(1, 143)),
    ([End(1, 129), End(0, 3)], End(1, 129)),
    ([End(1, 130), End(0, 0), End(2, 3)], End(1, 130)),
    ([End(1, 143), End(0, 1)], End(0, 1)),
    # all were stopped by the launcher
    ([End(1, 143, told=True), End(0, -15, told=True)], None),
    ([End(1, 130, told=True), End(0, 3, told=True)], None),
    ([End(1, 130, told=True), End(0, 1, told=True)], End(0, 1, told=True)),
])
def test_the_cause_is_the_first_that_failed_by_itself(ends, expected):
    assert cause(ends) == expected


@pytest.mark.parametrize("ends, why, expected", [
    ([End(1, -9), End(0, 3), End(2, 3)], End(1, -9), 1),
    ([End(0, 3), End(2, 3), End(1, -9, True, True)], End(0, 3), 1),
    ([End(0, 3), End(2, 3), End(1, 143, True)], End(0, 3), 2),
])
def test_the_run_goes_on_without_who_was_lost(ends, why, expected):
    assert lost_worker(ends, why) == expected


@pytest.mark.parametrize("code, expected", [(-9, True), (-11, True), (3, True), (1, False),
                                            (2, False), (0, False), (143, False)])
def test_a_loss_is_a_signal_or_who_missed_one(code, expected):
    assert End(0, code).is_loss is expected


def test_ends_of_one_moment_are_ordered_by_what_they_explain():
    ends = [End(0, 1), End(1, 3), End(2, -9), End(4, 2), End(3, 2)]
    assert [end.worker for end in by_weight(ends)] == [3, 4, 2, 0, 1]


@pytest.mark.parametrize("end, expected", [
    (End(1, -9), "worker 1 was killed by SIGKILL (is there too little memory?)"),
    (End(0, -11), "worker 0 was killed by SIGSEGV"),
    (End(2, 5), "worker 2 ended with exit code 5"),
])
def test_an_end_in_words(end, expected):
    assert in_words(end) == expected
