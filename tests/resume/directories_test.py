"""Files are written as a whole or not at all, and one process at a time has a directory."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from towers.resume import directories

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


def test_a_write_that_fails_leaves_the_old_contents_and_no_other_file():
    path = Path("file.txt")
    directories.write_atomically(path, lambda file: file.write_text("old"))

    def fail_half_way(file):
        file.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        directories.write_atomically(path, fail_half_way)
    assert path.read_text() == "old"
    assert os.listdir() == ["file.txt"]


def test_what_a_killed_process_left_goes_and_nothing_else():
    for name in (".best.5.tmp.keras", ".results.5.tmp.csv", "best.keras", "results.csv", ".mine"):
        Path(name).touch()
    directories.remove_temporary_files(Path("."))
    assert sorted(os.listdir()) == [".mine", "best.keras", "results.csv"]


def test_a_forked_child_that_outlives_the_run_does_not_hold_its_lock(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    try:
        with directories.locked(tmp_path):
            child.start()
            time.sleep(0.5)  # the child has left the lock
            with pytest.raises(ValueError, match=f"process {os.getpid()} trains there"):
                with directories.locked(tmp_path):
                    pytest.fail("two runs in one directory")
        with directories.locked(tmp_path):
            assert child.is_alive()
    finally:
        child.kill()
        child.join()
