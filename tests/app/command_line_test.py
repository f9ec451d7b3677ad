"""A command: one error line, an exit code that says how it ended; its child ends with it."""

import ast
import dataclasses
import errno
import io
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from absl import flags

from tests import processes
from towers.app import command_line, fields
from towers.app.command_line import exit_code, GROUPS, MOST_USED
from towers.app.config import TrainConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@dataclasses.dataclass
class Fields:
    num_a: int | None = fields.count(None, "Of these tests.")
    num_b: float | str = fields.number("auto", "More.", word="auto")
    checks_c: bool | str = fields.switch(False, "See `num_a`.", word="warn")
    kind_d: str = fields.choice("x", ("x", "y"), "One of two.", refused={"slow": "Use x."})


@pytest.fixture
def defined(monkeypatch):
    monkeypatch.setattr(flags.FlagValues, "validate_all_flags", lambda self: None)  # of others
    command_line.define_fields(Fields)
    yield
    for field in dataclasses.fields(Fields):
        delattr(flags.FLAGS, field.name)


@pytest.mark.parametrize(
    "name, values, wrong",
    [
        ("num_a", {"--num_a=8": 8, "--num_a=-1": -1}, "--num_a=2.5"),
        ("num_b", {"--num_b=8": 8.0, "--num_b=auto": "auto"}, "--num_b=often"),
        (
            "checks_c",
            {
                "--checks_c": True,
                "--nochecks_c": False,
                "--checks_c=false": False,
                "--checks_c=warn": "warn",
            },
            "--checks_c=perhaps",
        ),
        ("kind_d", {"--kind_d=y": "y", "--kind_d=slow": "slow"}, "--kind_d=z"),
    ],
)
def test_a_field_is_a_flag_of_its_kind_or_word(name, values, wrong, defined):
    for argument, value in values.items():
        flags.FLAGS(["command", argument])
        assert flags.FLAGS[name].value == value
    with pytest.raises(flags.IllegalFlagValueError, match=f"flag {wrong}"):
        flags.FLAGS(["command", wrong])
    shown = flags.FLAGS.module_help(__name__)
    assert "--[no]checks_c: See --num_a." in shown and "--kind_d: <x|y>: One of two." in shown


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "num_a (8) is more than this machine has. Use num_a=2, or num_a=2 num_b=8.",
            "--num_a (8) is more than this machine has. Use --num_a=2, or --num_a=2 --num_b=8.",
        ),
        ("--num_a (0) must be at least 1.", "--num_a (0) must be at least 1."),
        (
            "python train.py --resume=num_a=2 of runs/num_a=2 (num_a=2)",
            "python train.py --resume=num_a=2 of runs/num_a=2 (num_a=2)",
        ),
        ("`num_a`, or a larger `num_b`; `other`", "--num_a, or a larger --num_b; `other`"),
    ],
)
def test_a_librarys_argument_becomes_a_flag_where_it_has_a_value_or_backquotes(
    text, expected, defined
):
    assert command_line.as_flags(text) == expected


def test_the_librarys_errors_speak_of_arguments_not_of_flags():
    """Flags are of commands; `as_flags` makes them of arguments."""
    wrong = []
    for file in (ROOT / "towers").rglob("*.py"):
        if file.name in ("command_line.py", "__main__.py") or file.parent.name == "launch":
            continue
        for call in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("Error"):
                text = ast.unparse(call)
                if re.search(r"--[\w{]", text) and "python train.py" not in text:
                    wrong.append(f"{file.name}: {text}")
    assert wrong == []


@pytest.mark.parametrize(
    "error, code, stderr",
    [
        (ValueError("--x (3) must\n   be 2."), 2, "error: --x (3) must be 2.\n"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C\n"),
        (signal.SIGTERM, 143, "stopped by SIGTERM\n"),
        (signal.SIGHUP, 129, "stopped by SIGHUP\n"),
    ],
)
def test_what_the_user_has_done_is_one_line(error, code, stderr, capsys):
    def command():
        if not isinstance(error, int):
            raise error
        with suppress(Exception):
            signal.raise_signal(error)

    assert exit_code(command) == code
    assert capsys.readouterr() == ("", stderr)


def test_anything_else_is_a_traceback_and_1_and_success_is_0(capsys):
    assert exit_code(lambda: None) == 0
    assert capsys.readouterr() == ("", "")
    assert exit_code(lambda: {}["x"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("Traceback") and captured.err.endswith("KeyError: 'x'\n")


def test_a_closed_terminal_takes_no_words_and_under_nohup_ends_nothing(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Closed())
    assert exit_code(lambda: signal.raise_signal(signal.SIGHUP)) == 129
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert exit_code(lambda: signal.raise_signal(signal.SIGHUP)) == 0


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


@pytest.mark.parametrize(
    "arguments, code, stdout, stderr",
    [
        ("", 0, "3\n", ""),
        ("--count=x", 2, "", "error: flag --count=x: invalid literal for int()"),
        ("--cuont=5", 2, "", "error: Unknown command line flag 'cuont'. Did you mean: count ?\n"),
        ("5", 2, "", "error: '5' is not a flag. Flags begin with --; see --help.\n"),
        ("--help", 0, "How many.", ""),
        ("--version", 0, "towers 0.", ""),
        ("--help >&-", 0, "", ""),
        ("--help | true", 0, "", ""),
        ("--flagfile=latin.flags", 2, "", "error: --flagfile: the file must be UTF-8 text: "),
    ],
)
def test_flags_are_filled_or_refused_in_one_line(arguments, code, stdout, stderr, tmp_path):
    (tmp_path / "latin.flags").write_text("# été\n--count=1\n", encoding="latin-1")
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$0" -c "$1" {arguments}', sys.executable, PROGRAM],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == code, done.stderr
    assert stdout in done.stdout and stderr in done.stderr
    assert bool(done.stdout) is bool(stdout)
    assert done.stderr.count("\n") == bool(stderr)


@pytest.mark.parametrize("name", ["wide_mlp", "towers/app/experiments/wide_mlp.flags"])
def test_a_documented_experiment_is_found_by_its_name_in_any_directory(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = str(Path(command_line.__file__).with_name("experiments") / "wide_mlp.flags")
    given = ["a", f"--flagfile={name}", "--flagfile=wide"]
    expected = ["a", f"--flagfile={path}", "--flagfile=wide"]
    assert command_line.with_experiments(given) == expected
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).touch()  # the user's own file comes first
    assert command_line.with_experiments(given) == given


def shown(*arguments):
    """The exit code, and the names of the flags in the order in which they are printed."""
    done = processes.run("train.py", *arguments)
    lines = [
        line.removeprefix("  --").removeprefix("[no]").partition(":")[0]
        for line in done.stdout.splitlines()
        if line.startswith("  --")
    ]
    return done.returncode, lines, done.stderr


def test_help_lists_every_flag_once_and_the_most_used_ones_first():
    code, names, _ = shown("--num_gpus=2", "--help")
    assert code == 0 and set(names[: len(MOST_USED)]) == set(MOST_USED)
    assert len(names) == len(set(names))
    assert set(names) == {field.name for field in dataclasses.fields(TrainConfig)} | {
        "devices",
        "runs",
        "evaluate",
        "predict",
        "replay",
        "at",
        "audit",
        "epoch",
        "out",
    }
    grouped = [name for _, members in GROUPS.values() for name in members]
    assert sorted(grouped) == sorted(names)


def test_help_of_a_group_lists_its_flags_alone_and_of_another_is_an_error_with_the_groups():
    code, names, _ = shown("--help=data")
    assert code == 0 and sorted(names) == sorted(GROUPS["data"][1])
    code, names, error = shown("--help=everything")
    assert (code, names) == (2, []) and error.count("\n") == 1
    assert "--help (everything)" in error and "model, data, optimization" in error


@pytest.mark.parametrize(
    "code, modules",
    [
        ("import towers.app.launch.__main__", "tensorflow keras numpy"),
        ("import towers.app.reading.readers", "tensorflow"),
        (
            "import towers.app.reporting.charts, towers.app.sweep.run_cells",
            "matplotlib tensorflow keras",
        ),
        (
            "from towers.app.__main__ import main; main(['train.py', '--runs', '--run_dir=x/run'])",
            "tensorflow keras",
        ),
    ],
)
def test_what_begins_soon_imports_none_of_these(code, modules, tmp_path):
    program = f"{code}; import sys; assert not set(sys.modules) & set({modules.split()})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    said = "no run in x\n" if "--runs" in code else ""
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
