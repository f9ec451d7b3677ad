"""The frame of a command: one `error:` line, and an exit code that says how it ended."""

import ast
import dataclasses
import errno
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from absl import logging as absl_logging

from towers.app import command_line, fields
from towers.app.command_line import Terminated, exit_code, is_verbose

ROOT = Path(__file__).parents[2]
# Modules whose texts may hold --flags, each with the reason; no ValueError of theirs, though.
SPEAK_OF_FLAGS = {
    "app/loop.py": "says at the end of a run what the command has done",
    "app/diagnosis/profile.py": "advice, printed by train.py --profile",
    "machine/nvidia.py": "a line of train.py --devices",
    "app/reporting/outcome.py": "the command that goes on with a run",
    "app/training/run_files.py": "names the commands that would refuse a file",
    "app/sweep/advice.py": "the last line of sweep.py",
    "app/sweep/run_cells.py": "a line of sweep.py",
}
A_FLAG = re.compile(r"--[\w{]")


@pytest.fixture(autouse=True)
def _signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def defined():
    """Flags of these names, for a test."""
    names = ("num_gpus", "num_towers", "batch_norm", "jit_compile")
    added = [name for name in names if name not in flags.FLAGS]
    for name in added:
        flags.DEFINE_string(name, None, "for these tests")
    yield
    for name in added:
        delattr(flags.FLAGS, name)


@dataclasses.dataclass
class Fields:
    count: int | str | None = fields.count(None, "Of these tests.", word="auto")
    checks: bool | str = fields.switch(False, "See `count`.", word="warn")


@pytest.fixture
def count():
    """A flag for a count, or auto; it is removed afterwards."""
    command_line.define_fields(Fields, ["count"])
    yield flags.FLAGS["count"]
    delattr(flags.FLAGS, "count")


def test_a_flag_takes_a_count_or_auto(count):
    for text, value in (("8", 8), ("-1", -1), ("auto", "auto")):
        count.parse(text)
        assert count.value == value
    with pytest.raises(flags.IllegalFlagValueError, match="whole number, or auto"):
        count.parse("2.5")


def test_a_flag_is_on_off_or_warn_and_help_lists_it_with_its_module(monkeypatch):
    monkeypatch.setattr(flags.FlagValues, "validate_all_flags", lambda self: None)  # of others
    command_line.define_fields(Fields, ["checks"])
    try:
        for argument, value in (
            ("--checks", True), ("--nochecks", False), ("--checks=false", False),
            ("--checks=warn", "warn"),
        ):
            flags.FLAGS(["command", argument])
            assert flags.FLAGS.checks == value
        with pytest.raises(flags.IllegalFlagValueError, match="must be true, false or warn"):
            flags.FLAGS(["command", "--checks=perhaps"])
        assert "--[no]checks: See --count." in flags.FLAGS.module_help(__name__)
    finally:
        delattr(flags.FLAGS, "checks")


@pytest.mark.parametrize(("text", "expected"), [
    ("num_gpus (8) is more than this machine has. Use num_gpus=2, or num_gpus=2 num_towers=8.",
     "--num_gpus (8) is more than this machine has. Use --num_gpus=2, or --num_gpus=2 "
     "--num_towers=8."),
    ("batch_norm ('x') must be one of average", "--batch_norm ('x') must be one of average"),
    ("--num_gpus (0) must be at least 1.", "--num_gpus (0) must be at least 1."),
    ("my.num_gpus=2 and max_num_gpus (3)", "my.num_gpus=2 and max_num_gpus (3)"),
    ("python train.py --resume=num_gpus=2 of runs/num_gpus=2 (num_gpus=2)",
     "python train.py --resume=num_gpus=2 of runs/num_gpus=2 (num_gpus=2)"),
    ("num_gpus alone is a word", "num_gpus alone is a word"),
    ("`num_gpus`, or a larger `num_towers`", "--num_gpus, or a larger --num_towers"),
    ("undefined_flag=2 and `undefined_flag`", "undefined_flag=2 and `undefined_flag`"),
])
def test_a_librarys_argument_becomes_a_flag_where_it_has_a_value_or_backquotes(
    text, expected, defined
):
    assert command_line.as_flags(text) == expected


def texts(tree):
    """(literal, whether it stands in an Error) of a module, without docstrings; values are {}."""
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    errors = [call for call in calls if ast.unparse(call.func).endswith("Error")]
    in_errors = {part for error in errors for part in ast.walk(error)}
    joined = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
            yield "".join(parts), node in in_errors
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in joined and node not in docstrings:
                yield node.value, node in in_errors


def flags_in(path):
    """The texts of a module that speak of --flags, but for those that name a whole command."""
    tree = ast.parse((ROOT / "towers" / path).read_text(encoding="utf-8"))
    return [
        (text, is_error)
        for text, is_error in texts(tree)
        if A_FLAG.search(text) and "python train.py" not in text
    ]


def test_the_librarys_texts_speak_of_arguments_not_of_flags():
    found = {}
    for file in (ROOT / "towers").rglob("*.py"):
        path = file.relative_to(ROOT / "towers").as_posix()
        is_a_command = path.endswith(("command_line.py", "__main__.py"))
        if not is_a_command and file.parent.name != "launch":
            found[path] = [t for t, error in flags_in(path) if error or path not in SPEAK_OF_FLAGS]
    assert {path: texts for path, texts in found.items() if texts} == {}


@pytest.mark.parametrize("path", sorted(SPEAK_OF_FLAGS))
def test_no_exception_to_that_outlives_its_reason(path):
    assert flags_in(path)


def raises(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize("error, code, stderr", [
    (ValueError("--x (3) must\n   be 2."), 2, "error: --x (3) must be 2.\n"),
    (KeyboardInterrupt(), 130, "stopped by Ctrl-C\n"),
    (Terminated(), 143, "stopped by SIGTERM\n"),
    (Terminated(signal.SIGHUP), 129, "stopped by SIGHUP\n"),
])
def test_what_the_user_has_done_is_one_line(error, code, stderr, capsys):
    assert exit_code(raises(error)) == code
    assert capsys.readouterr() == ("", stderr)


def test_anything_else_is_a_traceback_and_1(capsys):
    assert exit_code(raises(KeyError("x"))) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("Traceback") and captured.err.endswith("KeyError: 'x'\n")


def test_a_command_that_returns_is_0(capsys):
    assert exit_code(lambda: None) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_comes_as_an_error_that_except_exception_lets_pass(number):
    def command():
        try:
            signal.raise_signal(number)
        except Exception:
            pytest.fail("caught")

    assert exit_code(command) == 128 + number


def test_under_nohup_a_closed_terminal_ends_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert exit_code(lambda: signal.raise_signal(signal.SIGHUP)) == 0


def test_a_closed_terminal_takes_no_words_and_the_exit_code_stays(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Closed())
    assert exit_code(lambda: signal.raise_signal(signal.SIGHUP)) == 129


@pytest.mark.parametrize("verbosity, expected", [
    (absl_logging.WARNING, False), (absl_logging.INFO, True), (absl_logging.ERROR, False)
])
def test_a_mistakes_traceback_is_shown_to_who_asks_for_it(verbosity, expected, capsys):
    before = absl_logging.get_verbosity()
    absl_logging.set_verbosity(verbosity)
    try:
        assert is_verbose() is expected
        assert exit_code(raises(ValueError("wrong"))) == 2
    finally:
        absl_logging.set_verbosity(before)
    stderr = capsys.readouterr().err
    assert ("Traceback" in stderr) is expected
    assert stderr.endswith("error: wrong\n")


PROGRAM = """
import sys
from absl import flags
from towers.app.command_line import exit_code, parse_flags
flags.DEFINE_integer("count", 3, "How many.")
def command():
    if parse_flags(sys.argv):
        print(flags.FLAGS.count)
sys.exit(exit_code(command))
"""


@pytest.mark.parametrize("arguments, code, stdout, stderr", [
    ([], 0, "3\n", ""),
    (["--count=5"], 0, "5\n", ""),
    (["--count=x"], 2, "", "error: flag --count=x: invalid literal for int()"),
    (["--cuont=5"], 2, "", "error: Unknown command line flag 'cuont'. Did you mean: count ?\n"),
    (["5"], 2, "", "error: '5' is not a flag. Flags begin with --; see --help.\n"),
    (["--help"], 0, "How many.", ""),
])
def test_flags_are_filled_or_refused_in_one_line(arguments, code, stdout, stderr):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == code, done.stderr
    assert stdout in done.stdout and stderr in done.stderr
    assert bool(done.stdout) is bool(stdout)
    assert done.stderr.count("\n") == bool(stderr)


@pytest.mark.parametrize("where, code, stderr", [
    (">/dev/full", 2, "error: --help: stdout cannot be written: No space left on device.\n"),
    (">&-", 0, ""),
    ("| true", 0, ""),
])
def test_a_help_that_cannot_be_written_is_one_line_and_one_that_nobody_reads_none(
    where, code, stderr
):
    command = f'set -o pipefail; "$0" -c "$1" --help {where}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, PROGRAM], capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (code, stderr)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_a_flagfile_in_another_encoding_is_an_error_with_its_name(encoding, tmp_path):
    file = tmp_path / "my.flags"
    file.write_text("# été\n--epochs=1\n", encoding=encoding)
    with pytest.raises(ValueError, match=r"--flagfile \('.*my\.flags'\) must be UTF-8 text "):
        command_line.parse_flags(["train.py", f"--flagfile={file}"])
