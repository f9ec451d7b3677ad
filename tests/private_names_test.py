"""What Keras and TensorFlow keep private is known to three modules alone, the doors.

A name is private when it begins with one underscore. A file may use those that it binds itself:
`def _place`, `_LIMIT = 3`, `self._cores = 2`, a class's `_towers: _Towers`. All others are refused,
be they attributes, keyword arguments, imports or keys (`getattr(layer, "_x")`,
`vars(layer)["_x"]`), and so is every module inside of Keras and TensorFlow.
"""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
DOORS = [
    ROOT / f"towers/machine/{name}_internals.py"
    for name in ("callback", "data", "keras", "loss", "tensorflow")
]
PUBLIC = {  # by documentation
    "_asdict",
    "_fields",
    "_make",
    "_replace",  # NamedTuple's: no field can be called so
    "_exit",  # of os
    "_current_frames",  # of sys
    "_r",  # of tf.profiler.experimental.Trace
}
# Tests may look into towers, and into these.
OF_TESTS = {
    (
        "tests/divide/tower_step_graphs_test.py",
        "tensorflow.tsl.profiler.protobuf",
    ): "the kernels that ran: TensorFlow's profiler writes them in this format alone",
    (
        "tests/step/small_step.py",
        "tensorflow.python.eager",
    ): "the graphs after all optimizations, which no part of towers needs",
}

_PRIVATE = re.compile(r"_[^\W_]\w*")
_INSIDE = re.compile(r"tensorflow\.[\w.]+|keras\.src[\w.]*")  # all that is public is in `tf`
_INSIDE_ATTRIBUTES = {"python", "tsl", "core", "compiler", "__internal__"}
_BY_NAME = {  # functions that are told a name
    "getattr",
    "setattr",
    "hasattr",
    "delattr",
    "attrgetter",
    "methodcaller",
    "get",
    "pop",
    "setdefault",
    "import_module",
}


class Use(NamedTuple):
    """A private name, or a module inside of a library, and the line that it stands in."""

    name: str
    line: int


@functools.cache
def uses(tree):
    """The private names that a file takes from elsewhere, or binds on something else."""
    return [
        Use(name, getattr(node, "lineno", 0))
        for node in ast.walk(tree)
        for name in _mentioned(node)
        if _PRIVATE.fullmatch(name) or _INSIDE.fullmatch(name)
    ]


def _mentioned(node):
    match node:
        case ast.Attribute(value=ast.Name(id="tf" | "tensorflow"), attr=name) if (
            name in _INSIDE_ATTRIBUTES
        ):
            return [f"tensorflow.{name}"]
        case ast.Attribute(value=ast.Name(id="keras"), attr="src"):
            return ["keras.src"]
        case ast.Attribute(attr=name):
            return [name]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments) if (
            name in _BY_NAME
        ):
            return _texts(arguments)
        case ast.Subscript(slice=key):
            return _texts([key])
        case ast.Dict(keys=keys):
            return _texts(keys)
        case ast.keyword(arg=str(name)):
            return [name]
        case ast.Import(names=aliases):
            return [alias.name for alias in aliases]
        case ast.ImportFrom(module=module, names=aliases):
            within = f"{module}." if module in ("tensorflow", "keras") else ""
            return [module or "", *(within + alias.name for alias in aliases)]
    return []


def _texts(nodes):
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


@functools.cache
def bound(tree):
    """The names that a file binds: its functions, classes and variables, and what `self` gets."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def refused(tree, own):
    """The uses of private names that are neither public by documentation nor one's own.

    Those that a door knows are refused even where a file has one of its own.
    """
    allowed = PUBLIC | own - behind_doors()
    return [use for use in uses(tree) if use.name not in allowed]


@functools.cache
def parsed(path):
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def behind_doors():
    return {
        use.name
        for path in DOORS
        for use in uses(parsed(path))
        if use.name not in bound(parsed(path))
    }


def files(patterns):
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


@pytest.mark.parametrize(
    "users, known_to_all",
    [
        (["towers/**/*.py"], []),
        (
            ["*.py", "benchmarks/**/*.py", "examples/**/*.py"],
            ["towers/**/*.py", "benchmarks/**/*.py"],
        ),
        (["tests/**/*.py"], ["tests/**/*.py"]),  # what a test needs of towers is public
    ],
)
def test_what_others_keep_private_goes_into_one_of_the_doors(users, known_to_all):
    own = {name for path in files(known_to_all) for name in bound(parsed(path))}
    found = {
        (str(path.relative_to(ROOT)), use.line, use.name)
        for path in files(users)
        if path not in DOORS
        for use in refused(parsed(path), own | bound(parsed(path)))
    }
    assert {use for use in found if (use[0], use[2]) not in OF_TESTS} == set()


@pytest.mark.parametrize("file, name", OF_TESTS)
def test_what_is_allowed_is_used(file, name):
    assert name in {use.name for use in uses(parsed(ROOT / file))}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.stem)
def test_each_part_has_a_test(door):
    tests = "".join(p.read_text("utf-8") for p in files(["tests/machine/*_internals_test.py"]))
    functions = [n.name for n in parsed(door).body if isinstance(n, ast.FunctionDef)]
    public = [name for name in functions if not name.startswith("_")]
    assert [name for name in public if not re.search(rf"\b{name}\b", tests)] == []


@pytest.mark.parametrize(
    "text, names",
    [
        ("layer._moments", ["_moments"]),
        ("self._compile_loss", ["_compile_loss"]),
        ("getattr(layer, '_seed_generators', [])", ["_seed_generators"]),
        ("layer.__dict__['_moments'] = 3", ["_moments"]),
        ("f(_secret=3)", ["_secret"]),
        ("from elsewhere import _secret", ["_secret"]),
        ("from tensorflow.python.eager import context", ["tensorflow.python.eager"]),
        ("from tensorflow import python", ["tensorflow.python"]),
        ("import keras.src.losses", ["keras.src.losses"]),
        ("from keras import src", ["keras.src"]),
        ("tf.__internal__.tracking", ["tensorflow.__internal__"]),
        ("{'_noinline': True}", ["_noinline"]),
        ("row._replace(a=1)._fields", []),
        ("def _own(): pass\nself._mine = 1\nmodule._own(), self._mine", []),
        ("class A:\n    _own: int\nmodel._own", []),
        ("import keras\nfrom keras import layers\nmodel.__dict__", []),
    ],
)
def test_private_names_of_others_are_found_and_ones_own_are_not(text, names):
    tree = ast.parse(text)
    assert [use.name for use in refused(tree, bound(tree))] == names
