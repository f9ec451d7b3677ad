"""Lines above the one that moves, on a terminal; and readers that have gone."""

import fcntl
import os
import pty
import struct
import termios
import tty

import pytest

from towers.app.launch.screen import HELD_SECONDS, HeldBack, Lines, Screen, without_escapes

ERASE = b"\r\x1b[2K"


def all_of(descriptor):
    """What is there to read now; a terminal gives it in pieces."""
    found = b""
    while True:
        try:
            found += os.read(descriptor, 10_000)
        except BlockingIOError:
            return found


@pytest.fixture(name="tty_ends")
def _tty_ends():
    """(our end, its end) of a terminal of 50 columns."""
    ours, its = pty.openpty()
    tty.setraw(its)
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 50, 0, 0))
    os.set_blocking(ours, False)
    yield ours, its
    os.close(ours)
    os.close(its)


@pytest.fixture(name="terminal")
def _terminal(tty_ends, monkeypatch):
    """(a screen on a terminal of 50 columns, a function that returns what is written there)."""
    monkeypatch.setenv("TERM", "xterm")
    ours, its = tty_ends
    return Screen(its, its), lambda: all_of(ours)


@pytest.fixture(name="pipes")
def _pipes():
    """(a screen on two pipes, their reading ends)."""
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    yield Screen(to_out, to_err), out, err
    for descriptor in (to_out, to_err):
        os.close(descriptor)


def test_lines_and_errors_go_where_they_belong(pipes):
    screen, out, err = pipes
    screen.line(b"a line")
    screen.line(b"an error", is_error=True)
    assert not screen.is_terminal
    assert (os.read(out, 100), os.read(err, 100)) == (b"a line\n", b"an error\n")


def test_a_line_comes_above_the_moving_one(terminal):
    screen, written = terminal
    screen.draw(b"title\nEpoch 1 [=  ]")
    screen.draw(ERASE + b"Epoch 1 [== ]")
    written()
    screen.line(b"[worker 1] hello")
    assert written() == ERASE + b"[worker 1] hello\n" + ERASE + b"Epoch 1 [== ]"


def test_a_moving_line_in_pieces_is_redrawn_whole(terminal):
    screen, written = terminal
    screen.draw(b"\r1/10 loss ")
    screen.draw(b"0.5")
    written()
    screen.line(b"x", is_error=True)
    assert written() == ERASE + b"x\n" + b"\r1/10 loss 0.5"


def test_where_nothing_moves_nothing_is_erased(terminal):
    screen, written = terminal
    screen.draw(b"Epoch 1 [===]\n")
    screen.line(b"x")
    screen.end_drawing()
    assert written() == b"Epoch 1 [===]\nx\n"


@pytest.mark.parametrize("moving, end", [
    (b"\x1b[?25lEpoch 1", b"\n\x1b[?25h"), (ERASE + b"\x1b[?25h", b"\x1b[?25h"), (b"", b""),
])
def test_the_end_leaves_a_new_line_and_a_cursor(terminal, moving, end):
    screen, written = terminal
    screen.draw(moving)
    screen.end_drawing()
    screen.line(b"x")
    assert written() == moving + end + b"x\n"


def test_it_knows_the_terminals_size(terminal, pipes):
    assert terminal[0].is_terminal
    assert terminal[0].size() == (50, 20)
    assert pipes[0].size() == (80, 24)


def test_a_terminal_that_cannot_erase_gets_plain_lines(tty_ends, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert not Screen(tty_ends[1]).is_terminal


def test_a_reader_that_has_gone_is_written_to_no_more(pipes):
    screen, out, err = pipes
    os.close(out)
    screen.line(b"a line")
    screen.line(b"another")
    screen.line(b"an error", is_error=True)
    assert os.read(err, 100) == b"an error\n"


def test_a_closed_descriptor_is_not_written_to():
    out, to_out = os.pipe()
    os.close(to_out)
    screen = Screen(to_out, to_out)
    again = os.dup(out)  # gets the number
    screen.line(b"a line")
    screen.line(b"an error", is_error=True)
    assert screen.size() == (80, 24) or os.isatty(1)
    os.close(again)
    os.close(out)


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
    assert held.overdue(10.0 + HELD_SECONDS) == []
    assert held.overdue(10.1 + HELD_SECONDS) == [
        b"Traceback (most recent call last):", b"KeyError"
    ]
    assert held.overdue(100.0) == []


def test_colours_and_the_cursors_moves_are_no_text():
    text = b"\x1b[?25l\r\x1b[2K\x1b[1mEpoch 1\x1b[0m [\x1b[32m=\x1b[0m ]\x1b[1A\x1b[?25h"
    assert without_escapes(text) == b"\rEpoch 1 [= ]"
