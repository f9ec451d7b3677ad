"""The folders of the package import each other in one direction; tests lie in the same folders."""

import ast
import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "towers"
# The library's folders: each imports itself and those before it. `machine` joins the workers that
# the environment names before it counts devices.
LIBRARY = (
    "workers",
    "machine",
    "step",
    "divide",
    "resume",
    "parallel",
)
BESIDE = {"workers": ("machine",)}  # further folders that a folder may import
# The folders and modules of app/, in such an order, too. The library imports none of them.
APP = """
    child_process named monitor run_dir class_weight fields machine_fields training_fields config help
    completion command_line continued models reading datasets recipe training reporting loop
    diagnosis after_training run __main__ compare sweep launch
""".split()
ENTRY_POINTS = (
    "__init__",
    "__main__",
    "compare",
    "datasets",
    "models",
    "launch",
)  # names and commands
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path):
    """Returns the modules of towers that a file imports: ("step", "sharding"), ("config",), ..."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "towers" and rest:
                found.add(tuple(rest))
    return found


def allowed(parts):
    """Returns what a module may import: the first names, in the library or in app/."""
    if parts[0] == "app":
        place = parts[1] if len(parts) > 1 else "__init__"
        return {*LIBRARY, *(f"app.{name}" for name in APP[: APP.index(place) + 1])}
    place = LIBRARY.index(parts[0])
    return {*LIBRARY[: place + 1], *BESIDE.get(parts[0], ())}


def test_no_file_is_longer_than_400_lines():
    files = [*FILES, *(ROOT / "tests").rglob("*.py")]
    assert [p.name for p in files if len(p.read_text("utf-8").splitlines()) > 400] == []


def test_imports_run_downwards_and_the_library_imports_nothing_of_the_application():
    wrong = []
    for path in FILES:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in ENTRY_POINTS or parts == ("app", "__init__"):
            continue
        for name, *rest in imported(path):
            full = f"app.{rest[0]}" if name == "app" and rest else name
            if full not in {*allowed(parts), "__version__"}:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {full}")
    assert wrong == []


def test_the_trunk_imports_no_circle():
    """Nor does anything else: of any two modules at most one imports the other, however far."""
    modules = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in FILES}
    edges = {
        name: {".".join(target[:n]) for target in imported(path) for n in (1, 2, 3)} & set(modules)
        for name, path in modules.items()
        if not name.endswith("__init__")
    }
    graphlib.TopologicalSorter(edges).prepare()  # else it raises CycleError, which names them


# Test files without a module of that name, each with the reason.
CROSS_CUTTING = {
    "distribution_test": "setup.cfg and every hint to install what it names",
    "private_names_test": "every module: what Keras and TensorFlow keep private has one door",
    "conformance/default_device_test": "what a script makes without naming a device",
    "conformance/entry_points_test": "train.py, TowerStep and make_parallel are one and the same",
    "conformance/gradients_test": "every model",
    "conformance/assigned_test": "what layers assign in their call",
    "conformance/losses_test": "every kind of compiled loss; towers.gather",
    "conformance/recomputed_test": "layers whose results are computed again for the gradient",
    "conformance/custom_steps_test": "every model's own train_step",
    "conformance/state_test": "every kind of state that a layer keeps",
    "conformance/repeated_test": "every model, again and again",
    "conformance/same_bits_test": "every model on any number of devices",
    "conformance/workers_test": "the step over several processes",
    "workers_run_test": "train.py on several workers",
    "step/policy_test": "what each policy makes of a step; machine/devices_test: which it is",
    "benchmarks_test": "benchmarks/",
    "docs_test": "docs/",
    "examples_test": "examples/, experiments/",
    "experiments_text_test": "experiments/text.py",
    "stranger_test": "what a run directory or data from a stranger may run, follow and fill",
    "train_test": "train.py, sweep.py; full disks, closed pipes, too little memory",
    "interrupted_test": "train.py and fit with towers.Resume: what was interrupted goes on",
    "everyday_flags_test": "loop: what the flags of optimizer, loss and model make of a run",
    "gpu_test": "what needs a GPU, of every folder",
    "bits_test": "the tests' own: tests/bits.py, tests/conftest.py and what compares",
    "isolation_test": "the tests' own: tests/isolation.py",
    "divide/programs_test": "divide/, with every kind of model and step",
    "divide/drawn_test": "divide/, with drawn models, losses and steps",
    "layout_test": "all modules",
    "notebook_test": "examples/quickstart.ipynb, and what all of towers tells in a kernel",
    "composite_test": "ragged and sparse tensors, wherever a batch goes",
}


def named_for_a_module(test):
    """Whether "step/tower_test", or "step/tower_bits_test", has "step/tower"."""
    words = test.removesuffix("_test").split("_")
    names = ["_".join(words[:n]) for n in range(1, len(words) + 1)]
    folder, _, last = test.rpartition("/")
    return last == f"{folder.rpartition('/')[2]}_test" or any(
        (PACKAGE / f"{name}.py").exists() for name in names
    )


TESTS = {
    path.relative_to(ROOT / "tests").with_suffix("").as_posix()
    for path in (ROOT / "tests").rglob("*_test.py")
}


def test_every_test_file_has_its_module_or_a_reason():
    assert {test for test in TESTS if not named_for_a_module(test)} == set(CROSS_CUTTING)


def test_docstrings_name_files_that_exist():
    known = {path.name for path in ROOT.rglob("*.py")}
    of_others = {
        "keras/src/backend/tensorflow/nn.py",
        "keras/src/losses/loss.py",
        "examples/mnist_cnn.py",
        "file.py",
    }  # Keras' own; and a line of a user's
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            names = set(re.findall(r"[\w/]+\.py\b", ast.get_docstring(node) or ""))
            is_list = path.name == "__init__.py"  # of the package's own files
            for name in names - of_others:
                exists = (
                    any((folder / name).exists() for folder in (path.parent, ROOT))
                    if (is_list)
                    else Path(name).name in known
                )
                assert exists, f"{path}: {name}"


def test_the_step_is_nine_files_of_at_most_1700_lines_that_the_documentation_lists():
    page = (ROOT / "docs/how_it_works.md").read_text("utf-8")
    names = re.findall(r"^\d\. `([\w/]+)`", page, re.MULTILINE)
    assert len(names) == len(set(names)) == 9
    files = [(PACKAGE / f"{name}.py").read_text("utf-8") for name in names]
    assert sum(len(text.splitlines()) for text in files) <= 1700


def test_the_documents_of_promises_name_tests_that_exist():
    names = {test.rpartition("/")[2] for test in TESTS} | TESTS
    for document in ("faults.md", "exactness_reference.md"):
        text = (ROOT / "docs" / document).read_text("utf-8")
        assert set(re.findall(r"`([\w/]+_test)`", text)) - names == set()
