"""A stranger's run directory and data: nothing is executed, followed, waited for or filled.

SECURITY.md promises it. Real links, pipes, devices and processes.
"""

import ast
import os
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

from tests import processes
from tests.processes import soon
from towers.app.after_training.model_files import class_names, file_config, find_file
from towers.app.after_training.predicting import write_predictions
from towers.app.continued import continued_config
from towers.app.datasets import image_folder
from towers.app.sweep import table
from towers.app import run_dir
from towers.resume import directories

ROOT = Path(__file__).parents[1]
SMALL = (
    "--model=mlp --dataset=synthetic --num_gpus=1 --num_towers=1 --device=cpu --batch_size=512 "
    "--max_steps=1 --optimizer=sgd --run_dir=run"
).split()


def train(*flags, cwd):
    """Returns (exit code, stdout, stderr) of train.py in a process of its own."""
    done = processes.run("-m", "towers", *flags, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directory of a small run that is complete."""
    cwd = tmp_path_factory.mktemp("made")
    code, stdout, stderr = train(*SMALL, cwd=cwd)
    assert code == 0, stdout + stderr
    return cwd / "run"


@pytest.fixture
def run(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def link(path, target):
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def test_a_run_with_links_and_pipes_continues_and_changes_nothing_outside(run, tmp_path):
    """log.txt is left out with a warning, and other files are replaced."""
    victims = {}
    for number, name in enumerate(["log.txt", "results.png", "best.keras", "checkpoints/complete"]):
        victims[tmp_path / f"victim-{number}"] = ["precious"]
        (tmp_path / f"victim-{number}").write_text("precious")
        link(run / name, tmp_path / f"victim-{number}")
    for name in ("epoch-9-step-9", ".x.7.tmp"):
        victim = tmp_path / name
        shutil.copytree(next((run / "checkpoints").glob("epoch-0*")), victim)
        victims[victim] = sorted(os.listdir(victim))
        (run / "checkpoints" / name).symlink_to(victim)
    for name in ("results.csv", "classes.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    code, stdout, stderr = train("--resume=run", "--max_steps=2", cwd=tmp_path)
    assert code == 0, stdout + stderr
    for victim, held in victims.items():
        assert held == (sorted(os.listdir(victim)) if victim.is_dir() else [victim.read_text()])
    assert "run/log.txt cannot be written any more (it is a symbolic link, which" in stdout
    assert "epoch-9-step-9 is damaged: the directory cannot be read: it is a symb" in stdout
    for name in ("results.csv", "results.png", "best.keras", "checkpoints/complete"):
        assert not (run / name).is_symlink() and (run / name).is_file()


def test_a_link_that_would_lead_tensorflow_elsewhere_is_one_error_line(run, tmp_path):
    (tmp_path / "victim").mkdir()
    link(run / "tensorboard", tmp_path / "victim")
    code, stdout, stderr = train("--resume=run", "--max_steps=2", cwd=tmp_path)
    assert code == 2 and stderr.startswith("error: ") and stderr.count("\n") == 1, stdout + stderr
    assert "(run) cannot be used: run/tensorboard: it is a symbolic link, which towers" in stderr
    assert os.listdir(tmp_path / "victim") == []


OPENERS = {  # by the file that they open
    "config.json": [
        lambda: continued_config("run", {}),
        lambda: run_dir.create("run", "n", "{}"),
        lambda: file_config(Path("run/other.keras"), {}),
    ],
    "classes.json": [lambda: class_names(Path("run/best.keras"))],
    "best.keras": [lambda: find_file("run", "evaluate")],
    "sweep.csv": [lambda: table.read_table(Path("run/sweep.csv"))],
    "checkpoints/lock": [lambda: directories.locked(Path("run")).__enter__()],
    "checkpoints": [lambda: directories.locked(Path("run")).__enter__()],
}


def make_sparse(path):
    """It takes no room on the disk, and would take a terabyte of memory."""
    path.write_bytes(b"")
    os.truncate(path, 2**40)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, make_sparse, lambda path: path.symlink_to("victim")],
    ids=["pipe", "sparse", "link"],
)
@pytest.mark.parametrize("name", OPENERS)
def test_what_towers_opens_is_a_small_regular_file_or_an_error(name, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("run") / name
    path.parent.mkdir(parents=True)
    Path(path.parent, "victim").write_text("precious")
    make(path)
    if make is make_sparse and name in ("best.keras", "checkpoints/lock"):
        return  # towers does not read the lock whole, and Keras reads the zip file's parts
    for call in OPENERS[name]:
        with soon(), pytest.raises(ValueError) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert Path(path.parent, "victim").read_text() == "precious"


def test_a_new_run_makes_no_file_where_a_link_leads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    for target in ("nothing", "empty"):
        Path("empty").write_text("")
        link(Path("run/config.json"), tmp_path / target)
        with pytest.raises(ValueError, match="run_dir"):
            run_dir.create("run", "n", "{}")
        assert not Path("nothing").exists() and Path("empty").read_text() == ""


def test_no_link_can_wait_for_a_temporary_file(tmp_path):
    """Its name cannot be guessed; a process' number could."""
    names = []
    for _ in range(2):
        directories.write_atomically(
            tmp_path / "a.json", lambda path: (names.append(path.name), path.write_text(""))
        )
    assert names[0] != names[1] and not any(str(os.getpid()) in n.split(".") for n in names)


ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202egnp"


def test_names_of_images_reach_terminal_and_csv_without_escape_sequences(tmp_path, capfd):
    for label in ("a", f"b{ESCAPES}"):
        for part in ("train", "val"):
            folder = tmp_path / "photos" / part / label
            folder.mkdir(parents=True)
            for number in range(2):
                keras.utils.save_img(folder / f"{number}.png", np.zeros((4, 4, 3)))
    good = tmp_path / "photos/val/a" / f"{ESCAPES}.png"
    shutil.copy(tmp_path / "photos/val/a/0.png", good)
    files = image_folder.load(str(tmp_path / "photos"))
    out = tmp_path / "out.csv"
    probabilities = np.tile(np.float32([0.25, 0.75]), (len(files.test_names), 1))
    write_predictions(str(out), {"predictions": probabilities}, files.test_names, files.class_names)
    written = out.read_text()
    assert r"\x1b]0;owned\x07\x1b[2J\u202egnp.png" in written
    good.write_bytes(b"no image")
    with pytest.raises(ValueError) as caught:
        image_folder.load(str(tmp_path / "photos"))
    code, stdout, stderr = train(
        "--dataset=image_folder", f"--data_dir={tmp_path / 'photos'}", *SMALL[2:], cwd=tmp_path
    )
    assert code == 2 and "cannot be decoded" in stderr
    for text in (written, str(caught.value), stdout, stderr):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_data_that_are_pipes_or_endless_devices_are_an_error_and_links_to_images_are_not(tmp_path):
    for part in ("train", "val"):
        folder = tmp_path / part / "a"
        folder.mkdir(parents=True)
        keras.utils.save_img(tmp_path / f"{part}.png", np.zeros((4, 4, 3)))
        (folder / "link.png").symlink_to(tmp_path / f"{part}.png")
    assert image_folder.load(str(tmp_path)).input_shape == (4, 4, 3)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path = tmp_path / "train/a/z.png"
        make(path)
        with soon(), pytest.raises(ValueError, match="z.png cannot be decoded: it is no regular"):
            image_folder.load(str(tmp_path))
        with soon(), pytest.raises(ValueError, match="z.png cannot be decoded: it is no regular"):
            image_folder.decode(path, (4, 4, 3))
        path.unlink()


OPENED_ELSEWHERE = {  # each file of towers that opens a path itself, and why it may
    "machine/files.py": "the others' home",
    "machine/environment.py": "the user's keras.json",
    "machine/nvidia.py": "the driver's version",
    "machine/terminal.py": "/dev/null",
    "app/command_line.py": "/dev/null",
    "app/reporting/report.py": "/dev/null",
    "app/reporting/time_spent.py": "the system's entry of this process",
    "app/run_dir.py": "a URL's file up to a bound",
    "app/datasets/dataset.py": "the system's control groups",
    "app/datasets/image_folder.py": "objects that `files` has opened",
    "app/after_training/predicting.py": "a new file, and a member of it",
    "resume/checkpoints.py": "a new file",
    "resume/directories.py": "a written file, to flush it",
    "resume/snapshot.py": "the file of the user's CSVLogger",
}
OPENING = {"open", "read_text", "read_bytes", "GFile", "read_file", "memmap", "fromfile"}


def test_what_a_run_or_data_name_is_opened_in_one_module():
    """A new place that opens a path fails here until somebody has decided whose file it is."""
    found = set()
    for path in sorted((ROOT / "towers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "attr", getattr(called, "id", None))
            if name in OPENING and ast.unparse(getattr(called, "value", called)) != "files":
                found.add(path.relative_to(ROOT / "towers").as_posix())
    assert found == set(OPENED_ELSEWHERE)


def test_nothing_in_towers_runs_what_a_file_holds():
    """No pickle in any dress, no eval, no Keras file with code in it.

    What a process hands to its own child in memory is no file: there pickle is what Python has.
    """
    forbidden = set(
        "pickle cPickle dill cloudpickle joblib marshal shelve eval exec "
        "enable_unsafe_deserialization".split()
    )
    unsafe = {"allow_pickle": True, "safe_mode": False, "shell": True}
    package = ROOT / "towers"
    sources = set(package.rglob("*.py")) - {package / "app/reading/readers.py"}
    assert len(sources) > 30
    for source in sorted(sources):
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            where = f"{source}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                assert not forbidden & {str(name).split(".")[0] for name in modules}, where
            elif isinstance(node, ast.Name | ast.Attribute):
                assert getattr(node, "id", getattr(node, "attr", "")) not in forbidden, where
            elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
                value = node.value.value
                assert node.arg not in unsafe or value is not unsafe[node.arg], where
