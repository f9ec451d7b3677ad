"""What is installed under which name: every hint names the distribution of setup.cfg."""

import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
NAME = SETUP["metadata"]["name"]
EXTRAS = set(SETUP["options.extras_require"])
PACKAGE = "towers"  # what is imported; on the package index, the name of another project

# `pip install` and what follows on its line, up to the end of the command or of its quotation.
_HINT = re.compile(r"pip3? install ([^`;&|#\n]*)")
_OURS = re.compile(rf"(?<![\w./-])({PACKAGE}|{NAME}|\.)(?:\[([\w,-]*)\])?(?![\w/=-])")


def hints():
    """(file, what `pip install` is given) of each hint."""
    files = [p for p in ROOT.rglob("*") if p.suffix in (".py", ".md", ".flags", ".ipynb")]
    for path in [ROOT / ".ci/run", *files]:
        if path != Path(__file__) and not {"build", ".venv"} & set(path.parts):
            for found in _HINT.finditer(path.read_text(encoding="utf-8")):
                yield str(path.relative_to(ROOT)), found[1]


def ours(given):
    """(name, extras) of each requirement that is this project."""
    return [(name, set(filter(None, extras.split(",")))) for name, extras in _OURS.findall(given)]


def problem(given):
    """What is wrong with a hint; None where nothing is."""
    for name, extras in ours(given):
        if name == PACKAGE:
            return f"{name} is another project on the package index; this one is {NAME}"
        if extras - EXTRAS:
            return f"setup.cfg has no extra {extras - EXTRAS}"
    return None


@pytest.mark.parametrize("given, wrong", [
    ("-e '.[cuda]'", None), (f"'{NAME}[data,text]'", None), (NAME, None), ("numpy", None),
    ("'towers[data]'.\",", "another project"), ("numpy towers", "another project"),
    ("-e '.[gpu]'", "no extra {'gpu'}"), (f"{NAME}[all]", "no extra {'all'}"),
])
def test_a_wrong_hint_is_seen(given, wrong):
    found = problem(given)
    assert found is None if wrong is None else wrong in found


def test_every_hint_installs_this_project_and_extras_that_it_has():
    found = list(hints())
    assert sum(bool(ours(given)) for _, given in found) > 10
    assert [(path, given, problem(given)) for path, given in found if problem(given)] == []
