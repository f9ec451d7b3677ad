"""Only regular files of a bounded size are opened: real links, pipes, sockets and devices."""

import gzip
import os
import socket
from pathlib import Path

import pytest

from tests.processes import soon
from towers.machine import files
from towers.machine.files import RefusedError
from towers.machine.words import printable

OPENERS = {
    "read": lambda path: files.read(path, 100),
    "read_end": lambda path: files.read_end(path, 100),
    "append": files.open_to_append,
    "lock": files.open_to_lock,
    "data": lambda path: files.read(path, 100, follow=True),
    "gzip": files.read_gzip,
}
FOLLOWING = ("data", "gzip")


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


STRANGE = {
    "a pipe": os.mkfifo,
    "a socket": make_socket,
    "a folder": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a pipe": lambda path: (os.mkfifo("pipe"), path.symlink_to("pipe")),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("what", STRANGE)
def test_what_is_no_regular_file_is_refused_at_once(what, opener):
    path = Path("file")
    STRANGE[what](path)
    with soon(), pytest.raises(RefusedError, match="^file: it is (no regular file|a symbolic l)"):
        OPENERS[opener](path)


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("target", ["target", "nothing"])
def test_only_data_may_be_links(target, opener):
    """What a link leads to is neither read, changed nor made."""
    Path("target").write_bytes(gzip.compress(b"held", mtime=0))
    held = Path("target").read_bytes()
    Path("file").symlink_to(target)
    if opener in FOLLOWING and target == "target":
        OPENERS[opener]("file")
    else:
        with pytest.raises(FileNotFoundError if opener in FOLLOWING else RefusedError):
            OPENERS[opener]("file")
    assert Path("target").read_bytes() == held and not Path("nothing").exists()


def test_a_file_is_read_up_to_its_bound_and_its_end_however_large_it_is():
    path = Path("file")
    path.write_bytes(b"x" * 100)
    assert files.read(path, 100) == b"x" * 100
    with pytest.raises(RefusedError, match="^file: it is larger than 99 bytes$"):
        files.read(path, 99)
    with path.open("ab") as file:
        file.truncate(2**40)  # a sparse file takes no room on the disk
        file.write(b"end")
    assert files.read_end(path, 5) == "\0\0end"


def test_a_small_gzip_that_would_fill_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(files, "EXPANDED", 5_000)
    Path("good").write_bytes(gzip.compress(b"0" * 5_000, mtime=0))
    Path("bad").write_bytes(gzip.compress(b"0" * 10_000, mtime=0))
    assert len(files.read_gzip("good")) == 5_000
    with pytest.raises(RefusedError, match="^bad: it expands to more than 5,000 bytes$"):
        files.read_gzip("bad")


def test_a_link_anywhere_below_a_folder_is_found():
    folder = Path("folder")
    files.check_tree(folder)  # there is none yet
    (folder / "inner").mkdir(parents=True)
    files.check_tree(folder)
    (folder / "inner/link").symlink_to("/")
    with pytest.raises(RefusedError, match="^folder/inner/link: it is a symbolic link"):
        files.check_tree(folder)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("a\x1b]0;title\x07.png", r"a\x1b]0;title\x07.png"),
        ("a\x9b2J\x7f", r"a\x9b2J\x7f"),
        ("a\nerror: b\r", r"a\nerror: b\r"),
        ("a\u202egnp.exe\u2028", r"a\u202egnp.exe\u2028"),
        ("Größe 大 👩‍👧 \udcff\\x1b", "Größe 大 👩‍👧 \udcff\\x1b"),
    ],
)
def test_a_name_is_shown_without_what_a_terminal_obeys(text, shown):
    assert printable(text) == shown
