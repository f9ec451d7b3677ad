"""What is installed under which name: the commands, and every hint's distribution of setup.cfg."""

import configparser
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import processes

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
            for found in _HINT.finditer(path.read_text("utf-8")):
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


@pytest.mark.parametrize(
    "given, wrong",
    [
        (f"'{NAME}[remote,text]'", None),
        ("numpy", None),
        ("'towers[text]'.\",", "another project"),
        ("-e '.[gpu]'", "no extra {'gpu'}"),
    ],
)
def test_a_wrong_hint_is_seen(given, wrong):
    found = problem(given)
    assert found is None if wrong is None else wrong in found


def test_every_hint_installs_this_project_and_extras_that_it_has():
    found = list(hints())
    assert sum(bool(ours(given)) for _, given in found) > 10
    assert [(path, given, problem(given)) for path, given in found if problem(given)] == []


@pytest.mark.parametrize("name", ["towers-train", "towers-sweep", "towers-launch"])
def test_an_installed_command_starts_and_says_its_name(name, tmp_path):
    """As its script in an environment's bin/ starts it."""
    lines = SETUP["options.entry_points"]["console_scripts"].split("\n")
    module, _, function = dict(line.split(" = ") for line in lines if line)[name].partition(":")
    script = tmp_path / "bin" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    done = processes.run(script, "--help", cwd=tmp_path, timeout=100)
    assert (done.returncode, done.stderr) == (0, "") and name in done.stdout


def test_the_page_of_a_package_index_has_no_link_into_the_checkout():
    page = (ROOT / SETUP["metadata"]["long_description"].removeprefix("file: ")).read_text("utf-8")
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert all(link.startswith("https://") for link in links)
    assert "train.py" not in page and f"pip install {NAME}" in page


def test_what_the_package_brings_is_there():
    for package, patterns in SETUP["options.package_data"].items():
        folder = ROOT / package.replace(".", "/")
        assert all(list(folder.glob(pattern)) for pattern in patterns.split(", "))


def test_a_script_beside_a_checkout_called_towers_imports_the_package(tmp_path):
    """As after `pip install -e`, which puts what the wheel's .pth names at the path's end.

    With -S, so that no install of the package that is tested comes first.
    """
    pytest.importorskip("setuptools")
    checkout = tmp_path / PACKAGE
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "docs/package.md", "towers/__init__.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    build = "from setuptools import build_meta; build_meta.build_editable('..')"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (pth,) = (archive.read(name).decode() for name in archive.namelist() if ".pth" in name)
    script = f"import sys; sys.path.append({pth.strip()!r}); import towers; print(towers.__file__)"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        cwd=tmp_path,
        env=clean,
        text=True,
        capture_output=True,
    )
    assert (done.stdout.strip(), done.stderr) == (str(checkout / "towers/__init__.py"), "")
