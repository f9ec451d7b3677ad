"""Lines from pieces, and errors that wait."""

import pytest

from towers.launch import lines
from towers.launch.lines import HeldBack, Lines, without_escapes


def test_pieces_become_lines():
    found = Lines()
    assert found.add(b"one\ntw") == [b"one"]
    assert found.add(b"o\r\n\nthr") == [b"two", b""]
    assert (found.take_rest(), found.take_rest()) == (b"thr", b"")


def test_a_line_without_an_end_does_not_fill_the_memory():
    found = Lines()
    assert found.add(b"x" * 70_000) == [b"x" * 70_000]
    assert found.take_rest() == b""


@pytest.mark.parametrize("first", [
    b"error: --batch_size (0) must be at least 1.", b"Traceback (most recent call last):",
    b"Fatal Python error: Aborted", b"stopped by SIGTERM",
])
def test_an_error_waits_with_all_that_follows_it(first):
    held = HeldBack()
    assert held.add(b"a warning", 0.0) == [b"a warning"]
    assert held.add(first, 1.0) == []
    assert held.add(b"more", 1.1) == []
    assert (held.take(), held.take()) == ([first, b"more"], [])
    assert held.add(b"a warning", 1.2) == [b"a warning"]


def test_what_has_ended_nothing_is_shown_after_a_while():
    held = HeldBack()
    assert held.overdue(100.0) == []
    held.add(b"Traceback (most recent call last):", 10.0)
    held.add(b"KeyError", 14.0)
    assert held.overdue(10.0 + lines._SECONDS) == []
    assert held.overdue(10.1 + lines._SECONDS) == [
        b"Traceback (most recent call last):", b"KeyError"
    ]
    assert held.overdue(100.0) == []


def test_colours_and_the_cursors_moves_are_no_text():
    text = b"\x1b[?25l\r\x1b[2K\x1b[1mEpoch 1\x1b[0m [\x1b[32m=\x1b[0m ]\x1b[1A\x1b[?25h"
    assert without_escapes(text) == b"\rEpoch 1 [= ]"
