"""What a worker runs, and what it runs after a loss."""

import io
import sys

import pytest

from towers.app.launch import command
from towers.app.reporting.report import Report, title_line

TITLE = b"towers 0.1 | TensorFlow 2.21, Keras 3.15 | run: runs/cnn-mnist-001"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """train.py and fit.py; a run in `run`, and none in `empty`."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "fit.py"):
        (tmp_path / name).touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    (tmp_path / "empty").mkdir()


@pytest.mark.parametrize("words", [["train.py"], ["./fit.py", "--x"], ["-m", "package.module"]])
def test_a_script_or_a_module_is_run_by_this_python(words):
    command.check(words)
    assert command.python(words) == [sys.executable, *words]


def test_the_installed_command_is_run_by_this_python_too_and_typed_without_it():
    words = ["towers-train", "--epochs=3"]
    command.check(words)
    assert command.python(words) == [sys.executable, "-m", "towers", "--epochs=3"]
    assert command.typed(words) == "towers-train --epochs=3"


@pytest.mark.parametrize("words, message", [
    ([], "there is nothing to run: give the command behind --, as in python -m towers.launch"),
    (["python", "train.py"], "'python' comes by itself: begin the command with the script"),
    (["/usr/bin/python3.11", "train.py"], "'/usr/bin/python3.11' comes by itself"),
    (["trian.py"], "'trian.py' is no file in "),
    (["empty"], "'empty' is no file in "),
    (["-m"], "'-m' is no file in "),
])
def test_what_python_could_not_run_is_refused(words, message):
    with pytest.raises(ValueError) as error:
        command.check(words)
    assert message in str(error.value)


@pytest.mark.parametrize("words, announced, expected", [
    # the directory that the chief has named
    (["train.py", "--epochs=3"], "run", ["train.py", "--resume=run"]),
    # the one that the command names, in any of absl's ways; the last one counts
    (["train.py", "--run_dir=run", "--epochs=3"], None, ["train.py", "--resume=run"]),
    (["towers-train", "--run_dir=run"], None, ["towers-train", "--resume=run"]),
    (["train.py", "--epochs=3", "--run_dir", "run"], None, ["train.py", "--resume=run"]),
    (["train.py", "-run_dir=run"], None, ["train.py", "--resume=run"]),
    (["train.py", "--run_dir=empty", "--run_dir=run"], None, ["train.py", "--resume=run"]),
    # a run that did not begin
    (["train.py", "--run_dir=empty"], None, ["train.py", "--run_dir=empty"]),
    (["train.py", "--run_dir=new"], None, ["train.py", "--run_dir=new"]),
    (["train.py", "--epochs=3"], None, ["train.py", "--epochs=3"]),
    (["train.py", "--run_dir"], None, ["train.py", "--run_dir"]),
    # one that goes on already: --epochs may be a larger one
    (["train.py", "--resume=run", "--epochs=9"], "run", ["train.py", "--resume=run", "--epochs=9"]),
    # another script
    (["fit.py", "--run_dir=run"], "run", ["fit.py", "--run_dir=run"]),
    (["-m", "package.train", "--run_dir=run"], "run", ["-m", "package.train", "--run_dir=run"]),
])
def test_after_a_loss_train_py_resumes_and_others_start_again(words, announced, expected):
    assert command.again(words, announced) == expected


def test_the_directory_is_read_from_the_line_that_train_py_prints():
    out = io.StringIO()
    versions = {"towers": "0.1.0", "TensorFlow": "2.21.0", "Keras": "3.15.1"}
    Report(out).line(title_line(versions, "run: runs/my run-001"))
    assert command.announced_directory(out.getvalue().encode()) == "runs/my run-001"


@pytest.mark.parametrize("line, expected", [
    (TITLE, "runs/cnn-mnist-001"),
    (b"\x1b[1mtowers 0.1\x1b[0m | TensorFlow 2.21, Keras 3.15 | run: a\r", "a"),
    (b"towers 0.1 | TensorFlow 2.21, Keras 3.15 | plan", None),
    (b"my script says: " + TITLE, None),
    (b"\xff\xfe run: x", None),
    (b"", None),
])
def test_no_other_line_names_it(line, expected):
    assert command.announced_directory(line) == expected


@pytest.mark.parametrize("words, expected", [
    (["code/train.py", "--resume=run", "--epochs=9"], "train.py --resume=run"),
    (["code/fit.py", "--epochs=9"], "fit.py"),
    (["-m", "package.fit", "--epochs=9"], "package.fit"),
])
def test_its_title_is_the_script_and_the_run(words, expected):
    assert command.title(words) == expected


def test_it_is_shown_as_one_would_type_it():
    assert command.shown(["fit.py", "--name=two words"]) == "fit.py '--name=two words'"
