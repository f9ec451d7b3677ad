"""TrainConfig: its fields, what it refuses, its JSON; class weights; package.module:function."""

import dataclasses
import json
import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

import towers
from tests.loading import refusal
from towers.app import fields, named
from towers.app.class_weight import as_text, weights_of
from towers.app.config import TrainConfig
from towers.app.training_fields import step_epochs

NAMES = [field.name for field in dataclasses.fields(TrainConfig)]
# A flag is a promise: a new one needs a reason, and one that goes a line in CHANGELOG.md.
FLAGS = """
    model dataset data_dir image_size data_workers shuffle_buffer augment
    num_gpus logical_gpus num_towers accumulate towers_per_device device variable_device strategy add_on gpus_per_tower
    stages batch_size batch_size_per_gpu jit_compile cpu_threads worker_timeout hang_timeout
    epochs max_steps fast_dev_run optimizer learning_rate schedule warmup_steps weight_decay momentum clip_norm
    ema class_weight batch_norm freeze init_from seed precision
    deterministic nonfinite run_dir resume trust_run_dir checkpoint_every keep_checkpoints keep_best
    monitor monitor_mode
    callbacks early_stopping tensorboard price confusion_matrix noise_scale ledger verify_gradients profile plan
    export
""".split()
WRONG = {
    "num_gpus": [0, -1, "two", True, 100_000],
    "batch_size": [0],
    "learning_rate": [-0.1, math.nan, "fast"],
    "device": ["tpu"],
    "schedule": ["cosin", "step:6,3", [30, 60]],
    "freeze": ["("],
    "image_size": ["0x224", "8x8x2", (8, 8.5)],
    "stages": [["a,b", "c"], [1]],
    "towers_per_device": ["3,0", "any", [1.5]],
    "model": [None],
    "run_dir": ["a\0b"],
    "plan": ["yes"],
    "hang_timeout": [-1, "soon"],
}


def test_the_flags_are_these():
    assert NAMES == FLAGS


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_makes_no_sense_is_refused_by_name_value_and_what_it_must_be(name):
    for value in WRONG[name]:
        with pytest.raises(ValueError) as caught:
            TrainConfig(**{name: value})
        assert str(caught.value).startswith(f"{name} ({value!r}) must be "), value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 8, "batch_size_per_gpu": 8}, ".* give only one of them"),
        ({"logical_gpus": 8, "device": "cpu"}, r"logical_gpus \(8\) divides GPUs, and device=cpu"),
        ({"towers_per_device": "3,1", "num_towers": "auto"}, "num_towers=auto chooses .* only one"),
        ({"strategy": "async"}, "strategy=async: towers is synchronous"),
        ({"init_from": ""}, "`init_from` is empty"),
    ],
)
def test_values_that_contradict_each_other_are_refused(values, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        TrainConfig(**values)


def test_words_and_zeros_beside_numbers_are_accepted():
    config = TrainConfig(epochs=0, seed=2**32 - 1, hang_timeout=0, verify_gradients="warn")
    assert (config.epochs, config.hang_timeout, config.verify_gradients) == (0, 0, "warn")
    config = TrainConfig(num_towers="auto")
    assert (config.num_towers, config.fixed_towers, config.num_towers_on(2)) == ("auto", None, 2)


def test_batch_and_towers_follow_from_the_devices():
    batches = [{}, {"batch_size": 100}, {"batch_size_per_gpu": 16}]
    assert [TrainConfig(**v).global_batch_size(num_devices=3) for v in batches] == [128, 100, 48]
    towers = [{}, {"num_towers": 7}, {"accumulate": 3}, {"gpus_per_tower": 2}]
    assert [TrainConfig(**v).num_towers_on(2) for v in towers] == [2, 7, 6, 1]


def test_schedules_sizes_and_stages_are_read():
    assert (step_epochs("step:30,60"), step_epochs("cosine")) == ([30, 60], [])
    sizes = (None, "4x5", "4x5x3")
    assert [TrainConfig(image_size=s).image_shape for s in sizes] == [None, (4, 5, None), (4, 5, 3)]
    assert TrainConfig(stages="a, b").stage_names == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("image_size", (224, 224), "224x224"),
        ("stages", ["a", "b"], "a,b"),
        ("towers_per_device", (3, 1), "3,1"),
        ("schedule", {"step": [30, 60]}, "step:30,60"),
    ],
)
def test_lists_and_dicts_become_the_text_of_the_flag(name, value, text):
    config = TrainConfig(**{name: value})
    assert config == TrainConfig(**{name: text}) == TrainConfig.from_json(config.to_json())
    assert getattr(config, name) == text


@pytest.mark.parametrize(
    ("call", "wrong", "right"),
    [
        (TrainConfig, "gpus", "num_gpus"),
        (towers.TowerStep, "gpus", "devices"),
        (towers.train, "modell", "model"),
        (towers.make_parallel, "zzz", None),
    ],
)
def test_an_unknown_argument_is_an_error_with_the_name_that_is_meant(call, wrong, right):
    with pytest.raises(TypeError) as caught:
        call(**{wrong: 2})
    meant = f" Did you mean {right!r}?" if right else ""
    assert str(caught.value) == f"{call.__name__}() has no argument {wrong!r}.{meant}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json must be a JSON object"),
        ('{"colour": "red"}', "colour.*, which this version of towers does not know"),
        ('{"epochs": "twelve"}', r"^config.json: epochs \('twelve'\) must be a whole number "),
    ],
)
def test_json_of_something_else_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_json(text)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.sampled_from(NAMES), ANY_JSON)
@example("learning_rate", 10**400)
@example("model", [0] * 10_000)
@example("freeze", "a{99999999999999999999}")
@example("freeze", "(" * 5000 + ")" * 5000)
@example("schedule", "step:" + "9" * 5000)
@example("momentum", [["\U0001239a" * 99] * 3] * 3)
def test_any_value_of_any_field_is_taken_as_it_is_or_refused_by_its_name_in_a_line(name, value):
    text = json.dumps({name: value})
    try:
        config = TrainConfig.from_json(text)
    except ValueError as error:
        assert name in str(error) and len(str(error)) < 400
    else:
        kept = getattr(config, name)
        assert kept == value and type(kept) in (type(value), float)
        assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", ["run_dir", "model"])
def test_a_path_becomes_text_and_a_users_home_stands_for_its_tilde(name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for path, expected in ((Path("a") / "b", "a/b"), ("~/x", "/home/me/x")):
        assert getattr(TrainConfig(**{name: path}), name) == expected
    assert TrainConfig(freeze="~/x").freeze == "~/x"


def test_a_default_that_is_named_is_given_and_one_that_is_not_is_none():
    config = TrainConfig(strategy="parameter_server", seed=7, num_towers=None)
    assert config.given() == {"strategy": "parameter_server", "seed": 7}
    for copied in (dataclasses.replace(config), TrainConfig.from_json(config.to_json())):
        assert copied == config and copied.given() == {"seed": 7}
    assert pickle.loads(pickle.dumps(config)).given() == config.given()
    with pytest.raises(AttributeError):
        config.seed = 3


def test_the_text_of_the_configuration_is_the_help_of_all_its_fields():
    for field in dataclasses.fields(TrainConfig):
        help = fields.help_of(TrainConfig, field)
        assert help.endswith(".") and f"    {field.name}: {help}" in TrainConfig.__doc__


@pytest.mark.parametrize(
    "value, text",
    [
        (None, None),
        ("balanced", "balanced"),
        ("0:1,1:5", "0:1,1:5"),
        ("1: 0.1, 0: 2e0", "1:0.1,0:2"),
        ({0: 1, 1: 0.1234567890123}, "0:1,1:0.1234567890123"),
        ({np.int64(3): np.float32(0.5)}, "3:0.5"),
    ],
)
def test_weights_become_one_text_that_holds_every_digit(value, text):
    assert as_text(value) == text
    config = TrainConfig(class_weight=value)
    assert TrainConfig.from_json(config.to_json()).class_weight == text
    if isinstance(value, dict):
        assert weights_of(text) == value


@pytest.mark.parametrize(
    "value",
    [
        "0",
        "0:1,0:2",
        "a:1",
        "0:-1",
        "0:nan",
        "9999999:1",
        {},
        {0.5: 1},
        3,
    ],
)
def test_what_is_no_class_and_weight_is_refused(value):
    message = r"^class_weight \(.*\) must be balanced, or .* such as 0:1,1:5\.$"
    with pytest.raises(ValueError, match=message):
        TrainConfig(class_weight=value)


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


@pytest.mark.parametrize(
    ("spec", "text", "cause"),
    [
        *(
            (spec, "", "must have the form package.module:function")
            for spec in (":f", "m", "a..b:f", "dir/m.py:f")
        ),
        ("named_missing:build", "", "No module named 'named_missing'"),
        ("named_a:build", "def build(:", "SyntaxError"),
        ("named_a:build", "raise RuntimeError('one\\ntwo')", "RuntimeError: one two"),
        ("named_a:build", "raise SystemExit(0)", "SystemExit"),
        ("named_a:build", "import math\n\nmath.sqrt(-1)\n", "math domain error (named_a.py:3). "),
        ("named_a:build_nett", "def build_net(): pass", "Did you mean 'build_net'?"),
        ("named_a:build", "build = 3", "has no function 'build'"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_the_cause(spec, text, cause, module):
    module("named_a", text)
    message = refusal(named.import_function, spec, "model")
    assert message.startswith(f"model ({spec!r})") and cause in message
