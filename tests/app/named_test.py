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


def refusal(spec):
    with pytest.raises(ValueError) as caught:
        named.import_function(spec, "model")
    message = str(caught.value)
    assert message.startswith(f"model ({spec!r})") and "\n" not in message
    return message


def test_function_is_found_in_the_current_directory(module):
    module("named_a", "def build(): return 'built'")
    assert named.import_function("named_a:build", "model")() == "built"


def test_function_is_found_in_a_package(module):
    module("named_package.inner", "def build(): return 'inner'")
    assert named.import_function("named_package.inner:build", "model")() == "inner"


def test_function_may_import_its_neighbours_when_it_is_called(module):
    module("named_b", "def build():\n import named_neighbour\n return named_neighbour.VALUE")
    module("named_neighbour", "VALUE = 7")
    assert named.import_function("named_b:build", "model")() == 7


def test_current_directory_comes_last(module):
    sys.modules.pop("colorsys", None)
    module("colorsys", "def rgb_to_hsv(*rgb): return 'shadowed'")
    assert named.import_function("colorsys:rgb_to_hsv", "model")(0, 0, 0) == (0, 0, 0)


@pytest.mark.parametrize(
    "spec", [":f", "m:", "m", "a:b:c", "a..b:f", ".m:f", "dir/m.py:f", "m:f()"]
)
def test_other_forms_are_refused(spec):
    assert "must have the form package.module:function" in refusal(spec)


def test_missing_module_is_refused_with_the_cause(module):
    assert "No module named 'named_missing'" in refusal("named_missing:build")


@pytest.mark.parametrize(
    "text, cause",
    [
        ("def build(:", "SyntaxError"),
        ("raise RuntimeError('one\\ntwo')", "RuntimeError: one two"),
        ("import named_absent_too", "No module named 'named_absent_too'"),
        ("raise SystemExit(0)", "SystemExit"),
    ],
)
def test_module_that_fails_is_refused_with_the_cause(module, text, cause):
    module("named_failing", text)
    assert cause in refusal("named_failing:build")


def test_missing_function_is_refused_with_the_nearest(module):
    module("named_c", "def build_net(): pass")
    message = refusal("named_c:build_nett")
    assert "named_c.py" in message and "Did you mean 'build_net'?" in message


def test_value_that_is_no_function_is_refused(module):
    module("named_d", "build = 3")
    assert "is a int, not a function" in refusal("named_d:build")


def test_unknown_name_lists_the_names_the_nearest_and_the_form():
    assert str(named.unknown_name("CNM", "model", ("cnn", "mlp"))) == (
        "model ('CNM') must be one of cnn, mlp, or package.module:function. Did you mean 'cnn'?"
    )


def test_unknown_name_far_from_all_suggests_nothing():
    assert "Did you mean" not in str(named.unknown_name("xyz", "model", ("cnn", "mlp")))


def test_what_a_users_module_raises_is_named_with_its_line(module):
    module("named_raises", "import math\n\nmath.sqrt(-1)\n")
    assert "ValueError: math domain error (named_raises.py:3). " in refusal("named_raises:build")


def test_why_keras_cannot_load_a_model_is_the_class_that_it_does_not_know():
    config = "{'layers': " + "x" * 5000 + "}"
    error = TypeError(f"could not be deserialized. {config} Could not locate class 'Mixes'. Make")
    assert named.loading_failed(error) == "Could not locate class 'Mixes'"
    assert len(named.loading_failed(TypeError(config))) == 300
