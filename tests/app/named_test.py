"""`package.module:function` and unknown names."""

import sys

import pytest

from towers.app import named


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the current directory, which is not on sys.path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    written = []

    def write(name, text):
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        written.append(name.split(".")[0])

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] in written]:
        del sys.modules[name]


def test_a_function_is_found_in_the_current_directory_which_comes_last(module):
    module("named_package.inner", "def build():\n import named_neighbour as n\n return n.VALUE")
    module("named_neighbour", "VALUE = 7")
    assert named.import_function("named_package.inner:build", "model")() == 7
    sys.modules.pop("colorsys", None)
    module("colorsys", "def rgb_to_hsv(*rgb): return 'shadowed'")
    assert named.import_function("colorsys:rgb_to_hsv", "model")(0, 0, 0) == (0, 0, 0)


@pytest.mark.parametrize(("spec", "text", "cause"), [
    *((spec, "", "must have the form package.module:function")
      for spec in (":f", "m:", "m", "a:b:c", "a..b:f", ".m:f", "dir/m.py:f", "m:f()")),
    ("named_missing:build", "", "No module named 'named_missing'"),
    ("named_a:build", "def build(:", "SyntaxError"),
    ("named_a:build", "raise RuntimeError('one\\ntwo')", "RuntimeError: one two"),
    ("named_a:build", "import named_absent", "No module named 'named_absent'"),
    ("named_a:build", "raise SystemExit(0)", "SystemExit"),
    ("named_a:build", "import math\n\nmath.sqrt(-1)\n", "math domain error (named_a.py:3). "),
    ("named_a:build_nett", "def build_net(): pass", "Did you mean 'build_net'?"),
    ("named_a:build", "build = 3", "has no function 'build'"),
])
def test_what_cannot_be_imported_is_refused_with_the_cause(spec, text, cause, module):
    module("named_a", text)
    with pytest.raises(ValueError) as caught:
        named.import_function(spec, "model")
    message = str(caught.value)
    assert message.startswith(f"model ({spec!r})") and "\n" not in message and cause in message


def test_an_unknown_name_lists_the_names_the_nearest_and_the_form():
    assert str(named.unknown_name("CNM", "model", ("cnn", "mlp"))) == (
        "model ('CNM') must be one of cnn, mlp, or package.module:function. Did you mean 'cnn'?"
    )
    assert "Did you mean" not in str(named.unknown_name("xyz", "model", ("cnn", "mlp")))
