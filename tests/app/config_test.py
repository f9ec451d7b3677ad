"""TrainConfig: what it refuses, in which words, and its JSON."""

import dataclasses
import json
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from towers.app.config import TrainConfig, step_epochs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_gpus": 0}, r"num_gpus \(0\) must be at least 1\."),
        ({"num_gpus": -1}, r"num_gpus \(-1\) must be at least 1\."),
        ({"num_gpus": "two"}, r"num_gpus \('two'\) must be a whole number\."),
        ({"num_gpus": True}, r"num_gpus \(True\) must be a whole number\."),
        ({"logical_gpus": 0}, r"logical_gpus \(0\) must be at least 1\."),
        ({"logical_gpus": 8, "device": "cpu"}, r"logical_gpus \(8\) divides GPUs, and device"),
        ({"num_towers": 0}, r"num_towers \(0\) must be at least 1\."),
        ({"batch_size": 0}, r"batch_size \(0\) must be at least 1\."),
        ({"batch_size_per_gpu": 0}, r"batch_size_per_gpu \(0\) must be at least 1\."),
        ({"batch_size": 8, "batch_size_per_gpu": 8}, ".* give only one of them"),
        ({"epochs": -1}, r"epochs \(-1\) must be at least 0\."),
        ({"epochs": None}, r"epochs \(None\) must be a whole number\."),
        ({"max_steps": 0}, r"max_steps \(0\) must be at least 1\."),
        ({"seed": -1}, r"seed \(-1\) must be at least 0\."),
        ({"seed": 2**32}, r"seed \(4294967296\) must be at most 4294967295\."),
        ({"learning_rate": 0.0}, r"learning_rate \(0\.0\) must be above 0"),
        ({"learning_rate": -0.1}, r"learning_rate \(-0\.1\) must be above 0"),
        ({"learning_rate": math.nan}, r"learning_rate \(nan\) must be above 0"),
        ({"learning_rate": math.inf}, r"learning_rate \(inf\) must be above 0"),
        ({"learning_rate": "fast"}, r"learning_rate \('fast'\) must be a number\."),
        ({"device": "tpu"}, r"device \('tpu'\) must be one of auto, gpu, cpu\."),
        ({"precision": "int8"}, r"precision \('int8'\) must be one of float32, "),
        ({"batch_norm": "sum"}, r"batch_norm \('sum'\) must be one of average, "),
        ({"num_towers": "many"}, r"num_towers \('many'\) must be a whole number\."),
        ({"accumulate": 0}, r"accumulate \(0\) must be at least 1\."),
        ({"schedule": "cosin"}, r"schedule \('cosin'\) must be one of constant, cosine, "),
        ({"schedule": "step:"}, r"schedule \('step:'\) must be one of "),
        ({"schedule": "step:6,3"}, r"schedule \('step:6,3'\) .* in ascending order"),
        ({"schedule": "step:0"}, r"schedule \('step:0'\) "),
        ({"schedule": 3}, r"schedule \(3\) must be one of "),
        ({"warmup_steps": -1}, r"warmup_steps \(-1\) must be at least 0\."),
        ({"weight_decay": 0.0}, r"weight_decay \(0\.0\) must be above 0"),
        ({"clip_norm": -1.0}, r"clip_norm \(-1\.0\) must be above 0"),
        ({"momentum": 1.0}, r"momentum \(1\.0\) must be a number from 0 to below 1"),
        ({"ema": 1.5}, r"ema \(1\.5\) must be a number from 0 to below 1, such as 0\.999"),
        ({"label_smoothing": -0.1}, r"label_smoothing \(-0\.1\) must be a number from 0"),
        ({"freeze": "("}, r"freeze \('\('\) is no regular expression: "),
        ({"init_from": ""}, "`init_from` is empty"),
        ({"histograms": True}, "`histograms` needs `tensorboard`"),
        ({"model": ""}, "`model` is empty"),
        ({"run_dir": ""}, "`run_dir` is empty"),
        ({"run_dir": "a\0b"}, r"run_dir \('a\\x00b'\) holds a zero character"),
        ({"monitor": 3}, r"monitor \(3\) must be text\."),
        ({"model": None}, r"model \(None\) must be text\."),
        ({"plan": "yes"}, r"plan \('yes'\) must be True or False\."),
        ({"image_size": "224"}, r"image_size \('224'\) must be HEIGHTxWIDTH, .* such as 224x224x3"),
        ({"image_size": "0x224"}, r"image_size \('0x224'\) must be "),
        ({"image_size": "8x8x2"}, r"image_size \('8x8x2'\) must be .* 1 \(gray\) or 3"),
        ({"image_size": (8, 8)}, r"image_size \(\(8, 8\)\) must be text"),
        ({"verify_gradients": "yes"}, r"verify_gradients \('yes'\) .* False or 'warn'\."),
        ({"batch_size": 10**19}, r"batch_size \(10{19}\) must be at most 2147483647\."),
        ({"num_gpus": 100_000}, r"num_gpus \(100000\) must be at most 1024\."),
        ({"num_towers": 10**9}, r"num_towers \(1000000000\) must be at most "),
        ({"learning_rate": 10**400}, r"learning_rate \(1000.*\) must be above 0 and finite"),
        ({"epochs": 2**63}, r"epochs \(9223372036854775808\) must be at most "),
        ({"hang_timeout": -1}, r"hang_timeout \(-1\) must be above 0 and finite, such as 300"),
        ({"hang_timeout": "soon"}, r"hang_timeout \('soon'\) must be a number, or auto\."),
        ({"data_timeout": 1e300}, r"data_timeout \(1e\+300\) must be at most "),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_name(values, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        TrainConfig(**values)


def test_zero_epochs_and_the_largest_seed_are_accepted():
    assert TrainConfig(epochs=0, seed=2**32 - 1).epochs == 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, 128), ({"batch_size": 100}, 100), ({"batch_size_per_gpu": 16}, 48)],
)
def test_the_global_batch_is_the_batch_size_or_the_devices_share_times_their_number(
    values, expected
):
    assert TrainConfig(**values).global_batch_size(num_devices=3) == expected


def test_the_towers_of_a_number_of_devices():
    configs = [{}, {"num_towers": 7}, {"accumulate": 3}]
    assert [TrainConfig(**values).num_towers_on(2) for values in configs] == [2, 7, 6]


def test_the_epochs_of_a_schedule():
    assert (step_epochs("step:30,60"), step_epochs("cosine")) == ([30, 60], [])


def test_an_image_size_may_leave_the_channels_open():
    sizes = (None, "4x5", "4x5x3")
    assert [TrainConfig(image_size=s).image_shape for s in sizes] == [None, (4, 5, None), (4, 5, 3)]


def test_json_brings_back_the_same_configuration():
    config = TrainConfig(model="a.b:c", num_gpus=2, learning_rate=0.1, run_dir="x y", plan=True)
    assert TrainConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["max_steps"] is None


@pytest.mark.parametrize(("entry", "warnings"), [
    ({"inline_towers": False, "pack_transfers": "auto", "prefetch_to_devices": None}, 0),
    ({"pack_transfers": False}, 1),
])
def test_what_an_older_config_chose_and_the_device_policy_decides_now_is_dropped(
    entry, warnings, recwarn
):
    assert TrainConfig.from_json(json.dumps({"epochs": 3, **entry})) == TrainConfig(epochs=3)
    assert [str(w.message).startswith("config.json: pack_transfers") for w in recwarn] == (
        [True] * warnings
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not JSON"),
        ("[]", "must hold an object"),
        ('{"colour": "red"}', "colour, which this version of towers does not know"),
        ('{"epochs": "twelve"}', r"^config.json: epochs \('twelve'\) must be a whole number\."),
        (f'{{"run_dir": {"[" * 900 + "]" * 900}}}', r"^config.json: run_dir \(\[+\.\.\.\]+\)"),
        ("[" * 100_000, "config.json is not JSON: it nests too deeply"),
    ],
)
def test_json_of_something_else_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_json(text)


NAMES = [field.name for field in dataclasses.fields(TrainConfig)]
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=8,
)


@given(st.sampled_from(NAMES), ANY_JSON)
@example("learning_rate", 10**400)
@example("ema", 10**400)
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


@pytest.mark.parametrize("name", ["run_dir", "data_dir", "resume", "init_from", "export", "model"])
def test_a_path_becomes_text(name):
    config = TrainConfig(**{name: Path("a") / "b"})
    assert getattr(config, name) == "a/b" and TrainConfig.from_json(config.to_json()) == config


def test_a_users_home_stands_for_its_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = TrainConfig(run_dir="~/x", data_dir=Path("~"), freeze="~/x")
    assert (config.run_dir, config.data_dir, config.freeze) == ("/home/me/x", "/home/me", "~/x")


def test_a_configuration_cannot_change():
    with pytest.raises(AttributeError):
        TrainConfig().epochs = 3


def test_a_default_that_is_named_is_given_and_one_that_is_not_is_none():
    config = TrainConfig(strategy="parameter_server", seed=7, num_towers=None)
    assert config.given() == {"strategy": "parameter_server", "seed": 7}
    for copied in (dataclasses.replace(config), TrainConfig.from_json(config.to_json())):
        assert copied == config and copied.given() == {"seed": 7}
    assert pickle.loads(pickle.dumps(config)).given() == config.given()
