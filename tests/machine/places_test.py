"""Paths: what they are, and how they are shown."""

from pathlib import Path

import pytest

from towers.machine.places import absolute, here, prefix


def test_a_path_is_that_of_the_moment_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    given = [absolute(path) for path in ("a/b", Path("a"), "/c", "~/d", "~")]
    assert given == [tmp_path / "a/b", tmp_path / "a", Path("/c"), Path("/home/me/d"),
                     Path("/home/me")]


def test_a_directory_that_is_gone_is_nowhere(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert here() == Path()


@pytest.mark.parametrize("text, shown", [
    ("run: /home/me/runs/x", "run: runs/x"), ("--run='/home/me/a b'", "--run='a b'"),
    ("/home/me/a and /home/me/b", "a and b"), ("/home/meat/a", "/home/meat/a"),
    ("/mnt/home/me/a", "/mnt/home/me/a"), ("/home/me", "/home/me"), ("/home/me/.", "."),
])
def test_what_lies_below_a_directory_is_shown_from_there(text, shown):
    assert prefix(Path("/home/me")).sub("", text) == shown


@pytest.mark.parametrize("directory", [Path("/"), Path()])
def test_in_the_root_paths_stay_whole(directory):
    assert prefix(directory).sub("", "/a/b ./c") == "/a/b ./c"
