"""The house: folders that build on each other in one direction, tests in the same places."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "towers"
# A folder imports those before it; the flat modules, the trunk, put all of them together.
ORDER = (
    "machine", "levels", "rows", "step", "own_step", "recipe", "saving", "resumed", "reporting",
    "diagnosis",
)
# Know nothing of towers; of the machine, only its cores.
APART = ("models", "datasets", "reading")
# Flat modules that folders may import: what defines a run, what it is made of, and the shape of
# what runs beside it.
TRUNK_BELOW = {
    "recipe": {"config", "listener", "named"},
    "saving": {"config", "build", "best", "listener"},
    "reporting": {"named", "config", "build", "best", "listener", "pace"},
    "diagnosis": {"config", "build", "command_line"},
    "models": {"named"},
    "datasets": {"named", "class_weight"},
    "reading": {"named"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path):
    """The modules of towers that a file imports: ("step", "sharding"), ("config",), ..."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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


def folder_of(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def is_folder(name):
    return (PACKAGE / name).is_dir()


def may_import(folder, name):
    """Whether files of a folder may import a folder, or a flat module."""
    if not is_folder(name):
        return name in TRUNK_BELOW.get(folder, set()) or name.startswith("__")
    below = ORDER[: ORDER.index(folder)] if folder in ORDER else ()
    return (
        name == folder
        or name in below
        or folder in APART and name == "machine"
        or folder == "datasets" and name == "reading"
        or name in APART and folder in ORDER[ORDER.index("saving"):]
    )


def test_imports_run_downwards():
    on_top = (None, "sweep", "launch", "after_training")
    assert [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in FILES if folder_of(path) not in on_top
        for name, *_ in imported(path) if not may_import(folder_of(path), name)
    ] == []


def test_the_trunk_imports_no_circle():
    """Nor does anything else: of any two modules at most one imports the other, however far."""
    modules = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in FILES}
    edges = {
        name: {".".join(target[:n]) for target in imported(path) for n in (1, 2)} & set(modules)
        for name, path in modules.items() if not name.endswith("__init__")
    }
    done, under_way = set(), []

    def visit(name):
        assert name not in under_way, " -> ".join([*under_way, name])
        if name in done:
            return
        under_way.append(name)
        for other in sorted(edges.get(name, ())):
            visit(other)
        under_way.pop()
        done.add(name)

    for name in sorted(edges):
        visit(name)


# Test files without a module of that name, each with the reason.
CROSS_CUTTING = {
    "distribution_test": "setup.cfg and every hint to install what it names",
    "private_names_test": "every module: what Keras and TensorFlow keep private has one door",
    "conformance/default_device_test": "all that a script makes without naming a device",
    "conformance/entry_points_test": "train.py, TowerStep and make_parallel are one and the same",
    "conformance/gather_test": "every place that Keras' own steps call",
    "conformance/gradients_test": "every model",
    "conformance/own_steps_test": "every model's own train_step",
    "conformance/state_test": "every kind of state that a layer keeps",
    "conformance/synchronized_test": "make_parallel: BatchNormalization",
    "conformance/placement_test": "every arrow of the step",
    "conformance/repeated_test": "every model, again and again",
    "conformance/same_bits_test": "every model on any number of devices",
    "conformance/workers_test": "the step over several processes",
    "workers_run_test": "train.py on several workers",
    "parallel_model_workers_test": "make_parallel on several workers",
    "step/policy_test": "what each policy makes of a step; machine/policy_test: which it is",
    "step/switches_test": "a step's switches against each other",
    "benchmarks_test": "benchmarks/", "gpu_benchmark_test": "benchmarks/",
    "machines_benchmark_test": "benchmarks/",
    "examples_test": "examples/", "experiments_test": "experiments/",
    "experiments_text_test": "experiments/text.py",
    "sweep_test": "sweep.py", "train_test": "train.py",
    "continue_test": "loop and saving: a run that goes on where it was interrupted",
    "everyday_flags_test": "loop: what the flags of optimizer, loss and model make of a run",
    "gpu_test": "what needs a GPU, of every folder",
    "isolation_test": "the tests' own: tests/isolation.py",
    "layout_test": "all modules",
    "ragged_test": "ragged tensors, wherever a batch goes",
    "process_test": "a run as a process: full disks, closed pipes, too little memory",
    "parallel_model_callbacks_test": "parallel_model, in parts",
    "parallel_model_devices_test": "parallel_model, in parts",
    "parallel_model_own_steps_test": "parallel_model, in parts",
    "parallel_model_saving_test": "parallel_model, in parts",
    "parallel_model_training_test": "parallel_model, in parts",
}


def mirrored():
    """Where a module's tests stand, without the ending: "step/tower_test"; a package's by name."""
    names = {}
    for path in FILES:
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        folder, _, name = module.rpartition("/")
        if name not in ("__init__", "__main__"):
            names[module] = f"{module}_test"
        elif folder:
            names[module] = f"{folder}/{folder}_test"
    return names


TESTS = {path.relative_to(ROOT / "tests").with_suffix("").as_posix()
         for path in (ROOT / "tests").rglob("*_test.py")}


def test_every_test_file_has_its_module_or_a_reason():
    assert TESTS - set(mirrored().values()) == set(CROSS_CUTTING)


def test_the_hour_is_nine_files_of_at_most_1650_lines_that_readme_lists():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = readme[readme.index("The hour is for nine files"):].split("The rest of the folder")[0]
    names = re.findall(r"`(\w+)`", listed)
    assert len(names) == len(set(names)) == 9
    files = [(PACKAGE / "step" / f"{name}.py").read_text(encoding="utf-8") for name in names]
    assert sum(len(text.splitlines()) for text in files) <= 1650
