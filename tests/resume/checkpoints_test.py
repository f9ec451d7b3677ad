"""Checkpoints on the disk: whole or not there, every damage seen, the last good one kept."""

import hashlib
import json
import os
import signal
import threading
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import processes
from towers.resume import checkpoints, directories
from towers.resume.checkpointer import Checkpointer
from towers.resume.checkpoints import ARRAYS, MANIFEST, Checkpoint, DamagedError
from towers.resume.train_state import TrainState
from towers.workers.workers import Workers


def make(value=0.0):
    return Checkpoint(
        {"step": 3, "nested": [1.5, None, {"a": float("inf")}]},
        {
            "model/0/kernel": np.full((2, 3), value, np.float32),
            "model/1/transposed": np.arange(6, dtype="float32").reshape(2, 3).T,
            "optimizer/0/iteration": np.array(7),
            "optimizer/1/half": np.array([1.5, 2.5], ml_dtypes.bfloat16),
            "metrics/0/none": np.zeros((0, 4), np.float32),
        },
    )


def save(directory, step, value=0.0):
    path = checkpoints.path_of(directory, 0, step)
    checkpoints.write(path, make(value))
    return path


def same(a, b):
    return (
        a.state == b.state
        and list(a.arrays) == list(b.arrays)
        and all(
            x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
            for x, y in zip(a.arrays.values(), b.arrays.values(), strict=True)
        )
    )


def test_the_newest_comes_first_by_its_number_not_by_its_name(tmp_path):
    for step in (9, 100, 20):
        save(tmp_path, step)
    (tmp_path / "epoch-1-step-7.old").mkdir()
    assert [checkpoints.step_of(path) for path in checkpoints.find(tmp_path)] == [100, 20, 9]
    assert checkpoints.read_newest(tmp_path)[0] == tmp_path / "epoch-0-step-100"


def flip(file, position=-1):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "a flipped value": (lambda p: flip(p / ARRAYS), "arrays.bin is not what was written"),
    "truncated values": (lambda p: os.truncate(p / ARRAYS, 9), "arrays.bin has 9 bytes instead"),
    "no values": (lambda p: (p / ARRAYS).unlink(), "arrays.bin cannot be read: No such file"),
    "garbage": (lambda p: (p / MANIFEST).write_bytes(b"\xff{"), "manifest.json is garbage"),
    "deep": (lambda p: (p / MANIFEST).write_text("[" * 100_000), "manifest.json is garbage"),
    "a pipe": (lambda p: replaced(p / MANIFEST, os.mkfifo), "manifest.json cannot be read: it is"),
    "a link to good values": (
        lambda p: replaced(p / ARRAYS, Path.symlink_to, p.with_name("epoch-0-step-1") / ARRAYS),
        "arrays.bin cannot be read: it is a symbolic link",
    ),
    "a linked checkpoint": (
        lambda p: (directories.remove(p), p.symlink_to(p.parent.parent / "elsewhere")),
        "the directory cannot be read: it is a symbolic link",
    ),
    "an endless manifest": (
        lambda p: os.truncate(p / MANIFEST, 2**40),
        "manifest.json cannot be read: it is larger",
    ),
}


def replaced(path, make, *given):
    """Makes something else in the place of a file."""
    path.unlink()
    make(path, *given)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_says_why_and_the_one_before_takes_its_place(damage, tmp_path):
    harm, message = DAMAGES[damage]
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    harm(bad)
    path, contents, wrong = checkpoints.read_newest(tmp_path)
    assert path == good and same(contents, make())
    (reason,) = wrong
    assert reason.startswith(f"{bad} is damaged: ") and message in reason
    harm(good)
    with pytest.raises(ValueError, match="no checkpoint is good: .*step-2 .*step-1 .*Nothing was"):
        checkpoints.read_newest(tmp_path)


def forge(path, content):
    """Writes a manifest whose hash is right."""
    text = json.dumps(content, sort_keys=True)
    held = {"content": content, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (path / MANIFEST).write_text(json.dumps(held))


@pytest.mark.parametrize("name", ["state", "arrays", "size", "sha256"])
@pytest.mark.parametrize("value", [None, 1.5])
def test_a_forged_manifest_whose_hash_is_right_is_damage_too(name, value, tmp_path):
    """One entry is missing (None) or holds something else."""
    path = save(tmp_path, 1)
    content = json.loads((path / MANIFEST).read_text())["content"]
    content[name] = value
    if value is None:
        del content[name]
    forge(path, content)
    with pytest.raises(DamagedError):
        checkpoints.read(path)


def test_links_among_checkpoints_are_removed_and_what_they_lead_to_stays(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    elsewhere = save(tmp_path, 1)
    for step in (2, 3, 4):
        save(folder, step)
    (folder / "epoch-0-step-1").symlink_to(elsewhere)
    (folder / ".x.5.tmp").symlink_to(elsewhere)
    checkpoints.prune(save(folder, 5), best_step=None)
    assert [checkpoints.step_of(path) for path in checkpoints.find(folder)] == [5, 4, 3]
    assert not os.path.lexists(folder / ".x.5.tmp") and same(checkpoints.read(elsewhere), make())


def test_a_newer_format_is_refused_rather_than_taken_for_damage(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoints, "FORMAT", 2)
    save(tmp_path, 2)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="step-2 has format 2, and this version of towers reads 1"):
        checkpoints.read_newest(tmp_path)


def test_a_damaged_checkpoint_is_written_anew_and_a_good_one_left_alone(tmp_path):
    path = save(tmp_path, 1)
    before = (path / ARRAYS).stat().st_mtime_ns
    save(tmp_path, 1, 5.0)
    assert (path / ARRAYS).stat().st_mtime_ns == before
    flip(path / ARRAYS)
    save(tmp_path, 1, 5.0)
    assert same(checkpoints.read(path), make(5.0))


def test_the_newest_three_and_the_best_are_kept_and_damaged_ones_push_no_good_one_out(tmp_path):
    for step in range(1, 8):
        checkpoints.prune(save(tmp_path, step), best_step=2)
    kept = checkpoints.find(tmp_path)
    assert [checkpoints.step_of(path) for path in kept] == [7, 6, 5, 2]
    for path in kept[:3]:
        flip(path / ARRAYS)
    checkpoints.prune(save(tmp_path, 4), best_step=None)
    assert checkpoints.read_newest(tmp_path)[0].name == "epoch-0-step-4"


@pytest.fixture
def folder(tmp_path):
    """The checkpoints of tmp_path."""
    folder = tmp_path / directories.CHECKPOINTS
    folder.mkdir()
    return folder


class Saver:
    """Saves one variable, and one value beside it; `said`: the warnings."""

    def __init__(self, folder, variable=0.0, value=None):
        self.said = []
        self._saver = Checkpointer(folder.parent, Workers(), self.said.append)
        variables = {"model": [keras.Variable([variable], name="kernel")]}
        self._saver.hold(lambda: variables, (), {"value": value})

    def save(self, step, meanwhile=lambda: None):
        """Whether the checkpoint is written, with the contents of `meanwhile` before it."""
        released = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            write = checkpoints.write
            patch.setattr(checkpoints, "write", lambda *args: released.wait() and write(*args))
            self._saver.save(TrainState(step=step))
            meanwhile()
            released.set()
            return self._saver.wait()


@pytest.mark.parametrize("states", ["x", [None]])
def test_forged_states_of_callbacks_are_an_error_before_anything_is_restored(states, tmp_path):
    saver = Checkpointer(tmp_path, Workers(), [].append)
    saver.hold(lambda: pytest.fail("restored"), (), {})
    found = Checkpoint({"callbacks": states}, {})
    saver.found = checkpoints.Found(tmp_path / "epoch-0-step-1", found, [])
    with pytest.raises(ValueError, match="step-1 is forged: its callbacks have no states"):
        saver.restore()


def test_a_state_that_grows_while_it_is_written_is_the_one_of_its_step(folder):
    seen = [1]
    saver = Saver(folder, value={"seen": seen, 9: 1})
    assert saver.save(1, lambda: seen.append(2))
    assert checkpoints.read_newest(folder)[1].state["value"] == {"seen": [1], "9": 1}


@pytest.mark.parametrize(
    "variable, value, words",
    [
        (0.0, {1, 2}, "its state is not JSON (Object of type set"),
        (0.0, "x" * 10_000, "as it could not be read: manifest.json cannot be read: it is larger"),
        (np.nan, None, "kernel holds NaN or infinite values"),
    ],
)
def test_what_could_not_go_on_is_not_written_and_nothing_is_removed_for_it(
    variable, value, words, folder, monkeypatch
):
    for step in (1, 2, 3):
        assert Saver(folder).save(step)
    monkeypatch.setattr(checkpoints, "LARGEST_MANIFEST", 10_000)
    for step in (4, 5, 6, 7):
        saver = Saver(folder, variable, value)
        assert not saver.save(step)
        (line,) = saver.said
        assert f"epoch-0-step-{step} is not written" in line and words in line
        assert line.endswith("; training continues.")
    assert [checkpoints.step_of(path) for path in checkpoints.find(folder)] == [3, 2, 1]


def fill_the_disk():
    raise OSError(28, "No space left on device")


class Faults:
    """Fails the n-th write, flush or rename of the module's file operations."""

    def __init__(self, monkeypatch, n, fail):
        self.left, self.fail = n, fail
        for owner, name in (
            (os, "fsync"),
            (os, "replace"),
            (checkpoints, "_write_arrays"),
            (Path, "write_bytes"),
        ):
            monkeypatch.setattr(owner, name, self._failing(name, getattr(owner, name)))

    def _failing(self, name, function):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left == 0:
                if name == "_write_arrays":
                    args[0].write_bytes(b"half")  # what was written before the disk was full
                self.fail()
            return function(*args, **kwargs)

        return call


@pytest.mark.parametrize("n", range(1, 8))
def test_a_save_that_fails_anywhere_leaves_the_checkpoint_before_it(n, folder, monkeypatch):
    old, saver = save(folder, 1), Saver(folder)
    with monkeypatch.context() as patch:
        faults = Faults(patch, n, fill_the_disk)
        went_well = saver.save(2)
    path, _, wrong = checkpoints.read_newest(folder)
    assert wrong == []
    assert not list(folder.glob(".*.tmp"))
    assert went_well is (faults.left > 0) and (old.exists() or went_well)
    if not went_well:
        assert saver.said == [
            f"{folder}/epoch-0-step-2 cannot be written (No space left on device); training "
            "continues."
        ]
    assert saver.save(3) and checkpoints.read_newest(folder)[0].name == "epoch-0-step-3"


def write_and_die(directory):
    """Kills a process of its own in each file operation of a write; called where no thread runs."""
    for n in range(1, 9):
        (directory / str(n)).mkdir()
        save(directory / str(n), 1)
        if os.fork() == 0:
            Faults(pytest.MonkeyPatch(), n, lambda: os.kill(os.getpid(), signal.SIGKILL))
            save(directory / str(n), 2)
            os._exit(0)
        os.wait()


def test_a_process_killed_anywhere_in_a_write_leaves_the_old_or_the_new_checkpoint(tmp_path):
    code = (
        "import pathlib; from tests.resume.checkpoints_test import write_and_die as f; "
        f"f(pathlib.Path({str(tmp_path)!r}))"
    )
    assert processes.run("-c", code).returncode == 0
    newest = []
    for n in range(1, 9):
        path, contents, wrong = checkpoints.read_newest(tmp_path / str(n))
        assert same(contents, make()) and wrong == []
        newest.append(checkpoints.step_of(path))
        checkpoints.prune(save(path.parent, 3), best_step=None)
        assert list(path.parent.glob(".*")) == []
    assert newest == [1, 1, 1, 1, 1, 1, 2, 2]


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
_QUICK = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read_or_refuse(path):
    try:
        checkpoints.read(path)
    except (DamagedError, ValueError) as error:
        assert str(error)


@_QUICK
@given(data=st.binary(max_size=300))
def test_any_bytes_for_a_manifest_give_one_clear_error(data, tmp_path):
    path = checkpoints.path_of(tmp_path, 0, 1)
    path.mkdir(exist_ok=True)
    (path / ARRAYS).write_bytes(b"")
    (path / MANIFEST).write_bytes(data)
    read_or_refuse(path)


@_QUICK
@given(
    arrays=st.lists(
        st.tuples(_ANY, st.sampled_from(["float32", "O", "V0", "U", "x", "finfo", "f4,f4"]), _ANY)
        | st.tuples(st.text(), _ANY, st.lists(st.integers(-9, 2**70)))
        | _ANY
    ),
    data=st.binary(max_size=64),
)
def test_any_list_of_arrays_gives_arrays_or_one_clear_error(arrays, data, tmp_path):
    """With digests that fit, so that the list itself is read."""
    path = checkpoints.path_of(tmp_path, 0, 1)
    path.mkdir(exist_ok=True)
    (path / ARRAYS).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    content = {"format": 1, "state": {}, "arrays": arrays, "size": len(data), "sha256": digest}
    forge(path, content)
    read_or_refuse(path)


@_QUICK
@given(position=st.integers(0, 10**6), file=st.sampled_from([ARRAYS, MANIFEST]))
def test_a_flipped_bit_anywhere_is_damage_or_changes_nothing(position, file, tmp_path):
    path = tmp_path / "epoch-0-step-1"
    if not checkpoints.find(tmp_path):
        save(tmp_path, 1)
    before = (path / file).read_bytes()
    flip(path / file, position % len(before))
    try:
        assert same(checkpoints.read(path), make())
    except DamagedError as error:
        assert file in str(error)
    (path / file).write_bytes(before)
