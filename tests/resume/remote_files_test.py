"""Files behind a URL: what is tried again, for how long, and what is said of it."""

import pytest

pytest.importorskip("fsspec")

import fsspec  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

from towers.resume.remote_files import RemoteFiles, UnreachableError  # noqa: E402


class Unreliable(MemoryFileSystem):
    """Writes all but the last byte, or refuses, as often as `faults` says."""

    protocol = "unreliable"
    store = {}
    pseudo_dirs = [""]
    faults = []

    def put_file(self, lpath, rpath, **arguments):
        super().put_file(lpath, rpath, **arguments)
        fault = self.faults.pop(0) if self.faults else None
        if fault is None:
            return
        self.pipe_file(rpath, self.cat_file(rpath)[:-1])
        if fault != "short":
            raise fault


@pytest.fixture(name="files")
def _files(tmp_path):
    fsspec.register_implementation("unreliable", Unreliable, clobber=True)
    Unreliable.store.clear()
    (tmp_path / "file").write_bytes(b"contents")
    files = RemoteFiles("unreliable://run", "run_dir")
    files.patience = 1.0
    yield files
    Unreliable.faults.clear()


def test_what_reads_back_otherwise_is_uploaded_again(files, tmp_path):
    Unreliable.faults[:] = ["short", ConnectionResetError("cut")]
    files.put(tmp_path / "file", "a/file", is_read_back=True)
    assert (files.names(), files.read("a/file")) == (["a/file"], b"contents")
    (said,) = files.said
    assert said == "uploading a/file took 3 attempts in 2 s, the last failure: cut"


def test_it_is_given_up_after_a_while_with_how_often_and_how_long(files, tmp_path):
    Unreliable.faults[:] = ["short"] * 9
    with pytest.raises(UnreachableError) as error:
        files.put(tmp_path / "file", "a/file", is_read_back=True)
    assert str(error.value) == (
        "uploading a/file: what is read back is not what was written (3 attempts in 2 s)"
    )


def test_what_another_attempt_would_not_mend_is_tried_once(files, tmp_path):
    Unreliable.faults[:] = [PermissionError("Access Denied.")]
    with pytest.raises(UnreachableError, match="^uploading a/file: Access Denied$"):
        files.put(tmp_path / "file", "a/file")
    with pytest.raises(FileNotFoundError):
        files.read("nothing")
    files.remove("nothing")
    assert files.said == []


def test_real_directories_are_made(tmp_path):
    """sftp:// and others have them; what fsspec calls local:// stands for these here."""
    (tmp_path / "file").write_bytes(b"contents")
    files = RemoteFiles(f"local://{tmp_path}/there/run", "run_dir")
    files.put(tmp_path / "file", "a/file", is_read_back=True)
    assert (tmp_path / "there/run/a/file").read_bytes() == b"contents"
    assert (files.names(), files.said) == (["a/file"], [])
