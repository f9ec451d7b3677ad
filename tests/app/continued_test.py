"""A run that was killed goes on to the bits of one that never was: real processes and signals."""

import ast
import dataclasses
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.resuming import (
    FLAGS,
    forked,
    NOTEBOOK,
    RESUME,
    ROOT,
    resumed,
    STEPS,
    train,
    uninterrupted,
)
from towers.app.after_training.model_files import file_config
from towers.app import run_dir
from towers.resume import directories
from towers.app import continued, fields
from towers.app.fields import Holds
from towers.app.continued import continued_config, identity
from towers.app.config import TrainConfig


def killed_at(step, *flags, cwd):
    """SIGKILL as soon as `step` updates are done, before the checkpoint of that step."""
    code, stdout, stderr = train(*flags, cwd=cwd, fault=f"step == {step} and kill('KILL')")
    assert code == -signal.SIGKILL, stdout + stderr


@pytest.mark.matrix
@pytest.mark.parametrize("flags, every", [(FLAGS, 3), (NOTEBOOK, 1)])
def test_a_run_killed_at_every_step_ends_with_the_same_bits(flags, every, tmp_path):
    """One process a step, each killed right after it.

    Dropout, BatchNorm, Adam and its schedule, the examples' order, ragged last batches.
    """
    killed_at(1, *flags, f"--checkpoint_every={every}", cwd=tmp_path)
    for step in range(2, STEPS + 1):
        killed_at(step, *RESUME, cwd=tmp_path)
    assert resumed(tmp_path) == uninterrupted(*flags)


def test_a_killed_run_resumes_on_any_devices_and_saves_at_a_signal_to_the_same_bits(tmp_path):
    """While a run is alive, it opens no socket, and no other process can train in its directory."""
    watched = (*FLAGS, "--nonfinite=skip", "--noise_scale", "--verify_gradients")
    fault = f"step == 4 and hold({str(tmp_path / 'go')!r})"
    first = forked(*watched, "--checkpoint_every=3", cwd=tmp_path, fault=fault)
    try:
        while not (tmp_path / f"go-{first.pid}").exists():
            assert first.returncode is None, first.communicate()
            time.sleep(0.02)
        descriptors = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{first.pid}/fd")]
        assert any(name.endswith("checkpoints/lock") for name in descriptors)
        assert not any(name.startswith("socket:") for name in descriptors)
        with pytest.raises(ValueError, match=f"is in use: process {first.pid} trains there. Wait"):
            with directories.locked(tmp_path / "run"):
                pytest.fail("two processes")
    finally:
        first.kill()
        first.communicate()
    flags = (*RESUME, "--num_gpus=1", "--checkpoint_every=2")
    code, stdout, stderr = train(*flags, cwd=tmp_path, fault="step == 6 and kill('INT')")
    assert code == 130 and stderr.endswith("stopped by Ctrl-C\n")
    assert stdout.endswith(
        "saved at step 6. Resume: python train.py --resume=run --trust_run_dir\n"
    )
    assert (outcome := resumed(tmp_path, "--num_gpus=4")) == uninterrupted(*watched)
    assert float(outcome["rows"][-1]["noise_scale"]) > 0


NAMED = {  # what a stranger could have run, by the field that names it
    "model": "os:getcwd",
    "dataset": "theirs:data",
    "augment": "pickle:loads",
    "callbacks": "package.module:function",
}
ENDS = {  # how each field for a text ends up: as code, as a path, or as words that select something
    **dict.fromkeys(NAMED, Holds.CODE),
    **dict.fromkeys(("data_dir", "init_from", "run_dir", "resume", "export"), Holds.PATH),
    **dict.fromkeys(
        """image_size towers_per_device stages optimizer schedule class_weight freeze
        monitor""".split(),
        Holds.WORDS,
    ),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "theirs.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    return directory


def write_config(run, **fields):
    (run / "config.json").write_text(TrainConfig(**fields).to_json())


def test_every_field_for_a_text_says_whether_it_names_code():
    """A new field fails here until somebody has decided, and wrote the decision into ENDS."""
    texts = {field.name: fields.declared(field) for field in dataclasses.fields(TrainConfig)}
    assert {n: says.holds for n, says in texts.items() if says.kind == "text"} == ENDS
    assert set(continued.CODE) == set(NAMED)


def test_only_fields_that_name_code_are_imported():
    """Every call that imports a name gives the field it comes from, or hands on its argument."""
    found = set()
    for path in sorted((ROOT / "towers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "attr", None) or (
                getattr(getattr(node, "func", None), "id", None)
            )
            if name in ("import_function", "import_module", "__import__"):
                found.add((path.name, ast.unparse(node.args[-1])))
    fixed = {
        ("__init__.py", "_MODULES[name]"),
        ("environment.py", "'tensorflow'"),
        ("named.py", "argument"),
        ("named.py", "module_name"),
    }
    assert {ast.literal_eval(given) for _, given in found - fixed} == set(NAMED)


@pytest.mark.parametrize("field", NAMED)
@pytest.mark.parametrize("place", [".", "run"])
def test_a_name_that_a_config_brings_is_imported_only_with_trust(place, field, run, monkeypatch):
    """Wherever the module lies. The file cannot trust itself, and what is given is the user's."""
    write_config(run, **{field: NAMED[field]}, trust_run_dir=True)
    monkeypatch.chdir(run if place == "." else run.parent)
    with pytest.raises(ValueError) as caught:
        continued_config(place, {})
    text = str(caught.value)
    assert f"resume ({place}): its config.json names {field}={NAMED[field]}, whose" in text
    assert "add trust_run_dir=True, or give the names yourself" in text
    for given in ({"trust_run_dir": True}, {field: NAMED[field]}):
        assert getattr(continued_config(place, given), field) == NAMED[field]


def test_evaluating_needs_trust_only_for_what_it_imports(run):
    write_config(run, **NAMED)
    file = run / "best.keras"
    with pytest.raises(ValueError) as caught:
        file_config(file, {})
    named = "names model=os:getcwd dataset=theirs:data, whose code"
    assert named in str(caught.value)
    given = {name: NAMED[name] for name in ("model", "dataset")}
    assert file_config(file, given).augment == file_config(file, {"trust_run_dir": True}).augment


def test_built_in_names_and_paths_are_no_modules(run):
    config = TrainConfig(model="cnn", data_dir="theirs:data", init_from="theirs:x.keras")
    (run / "config.json").write_text(config.to_json())
    Path("theirs:data").mkdir()  # the data have not moved
    assert continued_config("run", {}).model == "cnn"


def test_an_export_that_is_asked_for_again_is_made_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = TrainConfig(export="served")
    (tmp_path / "config.json").write_text(saved.to_json())
    other = continued_config(".", {"export": "other"})
    assert other.export == "other"
    assert continued_config(".", {}).export is None
    script = {"resume": "auto", "run_dir": ".", "export": "served"}
    assert continued_config(".", script).export == "served"
    (tmp_path / "served").mkdir()  # the script that is started again has exported already
    assert continued_config(".", script).export is None


def test_resume_lets_change_what_its_help_names_and_nothing_else(tmp_path):
    """What it lets change is no part of a run's identity."""
    (tmp_path / "config.json").write_text(TrainConfig(early_stopping=3, tensorboard=True).to_json())
    special = {
        "schedule": "cosine",
        "class_weight": "0:1,1:5",
        "image_size": "8x8x1",
        "towers_per_device": "3,1",
        "strategy": "mirrored",
    }
    free = {"tensorboard"}
    for field in dataclasses.fields(TrainConfig):
        says = fields.declared(field)
        other = (
            special.get(field.name)
            or {
                "text": "other",
                "count": 7,
                "number": 0.5,
                "switch": not field.default,
                "choice": says.words and says.words[-1],
            }[says.kind]
        )
        try:
            continued_config(str(tmp_path), {field.name: other})
            free.add(field.name)
        except ValueError as error:
            assert f"cannot change {field.name} (" in str(error)
        if field.name == "resume":
            help = set(re.findall(r"`(\w+)`", fields.help_of(TrainConfig, field)))
    assert free == help - {"run_dir"}
    assert not free & set(identity(TrainConfig()))


def test_other_devices_have_other_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"num_towers": 6, "towers_per_device": "3,1,1,1"}
    text = TrainConfig(device="auto", num_gpus=4, logical_gpus=8, **given).to_json()
    run_dir.create("run", "n", text)
    same = continued_config("run", {"checkpoint_every": 5})
    assert (same.num_gpus, same.logical_gpus, same.towers_per_device) == (4, 8, "3,1,1,1")
    moved = continued_config("run", {"device": "cpu"})
    assert (moved.num_gpus, moved.logical_gpus, moved.towers_per_device) == (None, None, None)
    assert continued_config("run", {"device": "gpu", "logical_gpus": 2}).logical_gpus == 2
    assert continued_config("run", {"logical_gpus": 2}).num_gpus == 4


def test_a_directory_without_a_run_is_an_error():
    with pytest.raises(ValueError, match=r"resume \(nowhere\) holds no run that can go on"):
        continued_config("nowhere", {})
