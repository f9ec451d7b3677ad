"""The documentation: its commands are commands, and the reference holds all that is public."""

import dataclasses
import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

import towers
from tests import plain_english, processes
from towers import TrainConfig
from towers.app import fields

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))

# Flags are global to a process: each command's words are parsed in one of their own, in turn.
PARSE = """
import json, sys
from absl import flags
from towers.app import command_line
from towers.app.config import TrainConfig
from {module} import define_flags

define_flags()
for words in json.loads(sys.argv[1]):
    flags.FLAGS.unparse_flags()
    try:
        command_line.parse_flags(["command", *words])
        given = {{
            name: flags.FLAGS[name].value for name in TrainConfig.__dataclass_fields__
            if name in flags.FLAGS and flags.FLAGS[name].present
        }}
        if isinstance(given.get("model"), list):  # a sweep's
            del given["model"]
        TrainConfig(**given)
    except ValueError as error:
        print(*words, error)
"""
MODULES = {
    r"train\.py|towers-train": "towers.app.__main__",
    r"sweep\.py|towers-sweep": "towers.app.sweep.__main__",
    r"towers\.launch|towers-launch": "towers.app.launch.__main__",
}
_BEFORE = r"python |python -m |-- |^(?=towers-)"


def code(page):
    """The lines of a page's blocks of code, and what stands in backquotes."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return [*"\n".join(blocks).replace("\\\n", " ").splitlines(), *re.findall(r"`([^`]+)`", rest)]


def commands(names):
    """The flags of each command of these names in docs/, up to the first word that is none."""
    for page in PAGES:
        for line in code(page.read_text("utf-8")):
            found = re.search(rf"(?:{_BEFORE})(?:{names})((?: +--\w\S*)+)", line)
            if found and found[1] != " --help":
                yield shlex.split(found[1])


@pytest.mark.parametrize("names, module", MODULES.items(), ids=MODULES.values())
def test_every_command_on_a_page_has_flags_and_values_that_there_are(names, module):
    found = list(commands(names))
    assert found
    script = PARSE.format(module=module)
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(found)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


@pytest.mark.parametrize(
    "sentence, advice",
    [
        ("What nobody knows goes on anew.", "begin with a subject"),
        ("Compute it of towers.gather(rows), the rows of all towers.", "say 'from'"),
        ("killed by the kernel for its memory", "begin with a subject, and add a verb"),
    ],
)
def test_a_sentence_that_made_readers_stumble_breaks_a_rule(sentence, advice):
    assert advice in plain_english.complaints(sentence)


def test_pages_help_and_messages_are_easy_to_read():
    assert plain_english.faults() == []


def test_the_table_of_flags_is_the_one_that_the_command_has():
    done = processes.run("docs/flag_table.py", "--print", cwd=ROOT, timeout=100)
    assert done.returncode == 0 and len(done.stdout) > 10_000, done.stderr[-2000:]
    page = (ROOT / "docs/flags.md").read_text("utf-8")
    assert page.endswith(f"to the end of the page. -->\n{done.stdout}"), "run docs/flag_table.py"


def test_the_reference_lists_every_public_name_once():
    page = (ROOT / "docs/reference.md").read_text("utf-8")
    listed = re.findall(r"^::: towers\.(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(towers.__all__)


def run_block(page, index, folder, **changes):
    """What a page's block of Python prints, with some of its text replaced."""
    text = (ROOT / page).read_text("utf-8")
    script = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[index]
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    done = processes.run("-c", script, cwd=folder, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.parametrize(
    "page, file",
    [
        ("README.md", "mnist.keras"),
        ("docs/keras.md", "model.keras"),
        ("docs/first_run.md", "backup"),
    ],
)
def test_the_first_script_of_a_page_runs_as_it_stands(page, file, tmp_path):
    done = run_block(page, 0, tmp_path)
    assert "Warning" not in done.stderr and (tmp_path / file).exists()


def test_every_message_of_the_troubleshooting_page_is_one_of_towers():
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    # machine/environment_test.py compares TensorFlow's own messages with what it prints.
    page = re.sub(r"## Messages of TensorFlow\n.*?(?=\n## )", "", page, flags=re.DOTALL)
    shown = [
        message
        for cell in re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", cell)
    ]
    assert len(shown) > 30
    sources = [path.read_text("utf-8") for path in (ROOT / "towers").rglob("*.py")]
    told = re.sub(r"\"\s*f?\"", "", "\n".join(sources))  # joins parts
    for message in shown:
        for part in re.split(r"\.\.\.|\d+|'[\w/:]+'", message):  # others differ from case to case
            assert part.strip() in told, message


def test_the_tutorial_on_a_custom_train_step_runs_and_gives_the_losses_of_keras(tmp_path):
    page = "docs/custom_train_step.md"
    assert "divergence" in run_block(page, 0, tmp_path, **{"20_000": "2_000"}).stdout
    done = run_block(page, 2, tmp_path, **{"10_000": "1_000"})
    assert "Warning" not in done.stderr
    keras, ours = (line.split(":")[1].split() for line in done.stdout.splitlines())
    differences = [abs(float(a) - float(b)) for a, b in zip(keras, ours, strict=True)]
    assert max(differences) < 2e-4


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples/cluster").glob("*.*")), ids=lambda path: path.name
)
def test_a_page_shows_each_file_for_a_cluster(path):
    shown = f"\n{path.read_text(encoding='utf-8').rstrip()}\n```\n"
    assert any(shown in page.read_text("utf-8") for page in PAGES)


@pytest.mark.matrix
def test_the_lesson_on_clusters_ends_with_the_same_weights_each_time(tmp_path):
    script, written = "examples/cluster/digits.py", []
    for words, devices in (([], 1), ([], 2), (["-m", "towers.launch", "--workers=2", "--"], 1)):
        file = tmp_path / f"{len(written)}.npz"
        done = subprocess.run(
            [sys.executable, *words, script, str(devices), str(file)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        written.append(file.read_bytes())
    assert written[0] == written[1] == written[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built with --strict."""
    pytest.importorskip("mkdocstrings", reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_the_site_shows_every_public_name_and_all_flags_with_their_defaults(site):
    page = (site / "reference.html").read_text("utf-8")
    assert [name for name in towers.__all__ if f'id="towers.{name}"' not in page] == []
    start = page.index('id="towers.TrainConfig"')
    shown = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", "", page[start:])))
    for field in dataclasses.fields(TrainConfig):
        told = fields.help_of(TrainConfig, field).replace("`", "")
        assert re.search(
            rf"{field.name} \([^()]*default: {re.escape(repr(field.default))} ?\) – "
            + re.escape(told),
            shown,
        ), field.name


def test_the_site_fetches_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link\b[^>]*rel=\"?(?:stylesheet|icon|preconnect)\"?[^>]*>", text)
        assert loaded and not [part for part in loaded if re.search(r"(?:https?:)?//", part)], page


@pytest.mark.parametrize(
    "words, page", [("checkpoint", "resuming"), ("gradient accumulation", "memory")]
)
def test_the_search_of_a_page_that_is_opened_as_a_file_finds_the_right_page_first(
    site, words, page, tmp_path
):
    """In a browser without a server, as a reader's."""
    assert (site / "search/search_index.js").read_text("utf-8").startswith("var __index = {")
    if shutil.which("chromium") is None:
        pytest.skip("apt-get install chromium")
    done = subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            f"file://{site}/index.html?q={quote(words)}",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = re.findall(r'href="([^"?]*)[^"]*" class="md-search-result__link', done.stdout)
    assert found and found[0] == f"file://{site}/{page}.html", found[:5]


def test_every_picture_of_a_page_is_in_the_site(site):
    for page in site.glob("*.html"):
        for source in re.findall(r"<img\b[^>]*\bsrc=\"([^\"]+)", page.read_text("utf-8")):
            assert (site / source).is_file(), (page, source)
    assert (site / "images/throughput.png").is_file()


@pytest.mark.matrix
def test_the_picture_of_the_terminal_shows_a_run_killed_and_gone_on(tmp_path):
    pytest.importorskip("pyte", reason="pip install -e '.[docs]'")
    train = "--model=mlp --num_gpus=2 --epochs=2 --batch_size=1024 --checkpoint_every=20"
    subprocess.run(
        [
            sys.executable,
            "docs/terminal.py",
            f"--train={train}",
            f"--out={tmp_path}/terminal.svg",
            r"--kill_at=Epoch\s+2/2\s.*\] \d\d/",
        ],
        cwd=ROOT,
        check=True,
        timeout=300,
    )
    picture = (tmp_path / "terminal.svg").read_text("utf-8")
    shown = html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", picture, flags=re.DOTALL))
    for words in ("--resume=runs/mlp-mnist-001", "Killed", "from step", "Done: 2 epochs"):
        assert words in shown.replace("\xa0", " ")
    assert not re.search(r"font-face|url\((?!#)", picture)
