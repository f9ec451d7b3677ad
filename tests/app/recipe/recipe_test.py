"""Changes of a built model; the optimizer and the schedule that flags make."""

import math

import keras
import numpy as np
import pytest

from tests.app.run_test import normalized_model
from towers.app.config import TrainConfig
from towers.app.recipe.model_changes import freeze, take_values
from towers.app.recipe.optimizer import (
    make_optimizer,
    make_schedule,
    override_optimizer,
    plain_schedule,
    shown_rate,
)


# Frozen layers
@pytest.fixture
def model():
    return normalized_model((3,), 3)


def test_a_layer_normalizes_by_its_statistics_and_the_others_are_trained(model):
    assert freeze(model, "(^|/)norm/") == "2 of 6 trainable variables frozen, 16 parameters"
    assert [v.path.rpartition("/")[0].rpartition("/")[2] for v in model.trainable_variables] == [
        "body",
        "body",
        "head",
        "head",
    ]
    norm = model.get_layer("norm")
    assert not norm.trainable
    x = np.full((2, 8), 3.0, "float32")
    np.testing.assert_allclose(norm(x, training=True), x / np.sqrt(1.001), rtol=1e-5)


def test_layers_of_inner_models_are_found_too():
    inner = normalized_model((3,), 3)
    outer = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2, name="top")])
    assert freeze(outer, "body|norm|head").startswith("6 of 8 ")
    assert [v.path.rpartition("top/")[2] for v in outer.trainable_variables] == ["kernel", "bias"]


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("bdy", r"^freeze \('bdy'\) is found in no .* 6, such as .*body/"),
        (".", "leaves no variable to train"),
        (
            "norm|body/bias",
            r"body/bias, and not in every variable .*Name whole layers, such as \^conv",
        ),
    ],
)
def test_nothing_everything_and_parts_of_a_layer_are_refused(model, pattern, message):
    with pytest.raises(ValueError, match=message):
        freeze(model, pattern)


# Values of a file
@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A model for 3 classes, its values all 7."""
    path = tmp_path_factory.mktemp("saved") / "saved.keras"
    model = normalized_model((3,), 3)
    for variable in model.weights:
        variable.assign(np.full(variable.shape, 7.0))
    model.save(path)
    return str(path)


def test_variables_of_the_same_name_and_shape_are_found_and_the_others_listed(file):
    """A head for 5 classes; the statistics of BatchNormalization are taken, too."""
    for classes, left in ((3, ""), (5, "; not found in it: head/kernel [8, 5], head/bias [5]")):
        model = normalized_model((3,), classes)
        (text,) = take_values(model, TrainConfig(init_from=file))
        found = [bool((v.numpy() == 7).all()) for v in model.weights]
        assert found == [True] * 6 + [not left] * 2
        assert text == f"{sum(found)} of 8 variables begin with the values in {file}{left}"


def test_names_inside_of_another_model_are_found(file):
    inner = normalized_model((3,), 3)
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2, name="top")])
    assert take_values(model, TrainConfig(init_from=file))[0].startswith("8 of 10 ")


def test_a_file_without_anything_of_the_model_and_a_missing_one_are_refused(file):
    """A run that goes on has its values in its checkpoint."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="other")])
    with pytest.raises(ValueError, match=r"init_from \(.*holds body/kernel \[3, 8\].* other/kern"):
        take_values(model, TrainConfig(init_from=file))
    with pytest.raises(ValueError, match="none.keras.* does not exist; name a file of model.save"):
        take_values(model, TrainConfig(init_from="none.keras"))
    assert take_values(model, TrainConfig(init_from="none.keras", resume="run")) == []


EPOCHS, STEPS = 4, 10
RATE = 0.5


def made(name="sgd", **values):
    return make_optimizer(TrainConfig(epochs=EPOCHS, **values), name, STEPS)


def changed(own, **values):
    return override_optimizer(own, TrainConfig(epochs=EPOCHS, **values), STEPS)


def test_flags_are_keras_arguments_and_without_them_its_defaults_stay():
    named = {"name": ""}
    assert made("SGD").get_config() | named == keras.optimizers.SGD().get_config() | named
    values = {"momentum": 0.9, "weight_decay": 0.01, "clip_norm": 2.0, "ema": 0.99}
    config = made(**values, schedule="cosine").get_config()
    names = "momentum", "weight_decay", "global_clipnorm", "use_ema", "ema_momentum"
    assert [config[name] for name in names] == [0.9, 0.01, 2.0, True, 0.99]
    assert config["learning_rate"]["config"]["initial_learning_rate"] == 0.01  # Keras' default
    scaled = made("rmsprop", learning_rate=0.5, precision="mixed_float16")
    assert isinstance(scaled, keras.optimizers.LossScaleOptimizer)
    assert float(scaled.inner_optimizer.learning_rate) == 0.5


@pytest.mark.parametrize(
    "name, values, message",
    [
        ("LossScaleOptimizer", {}, r"^optimizer \('LossScaleOptimizer'\) must be one of .*adam, "),
        ("lion", {"momentum": 0.9}, r"^momentum \(0.9\): lion has none. Use optimizer=sgd"),
    ],
)
def test_what_is_no_optimizer_and_an_argument_that_it_lacks_are_refused(name, values, message):
    with pytest.raises(ValueError, match=message):
        made(name, **values)


def test_a_models_own_optimizer_stays_where_nothing_or_the_rate_alone_is_given():
    own = keras.optimizers.SGD(0.5, momentum=0.9)
    own.build([keras.Variable([1.0])])
    own.iterations.assign(7)
    assert changed(own) is own and float(own.learning_rate) == 0.5
    assert changed(own, learning_rate=0.25) is own
    assert (float(own.learning_rate), int(own.iterations)) == (0.25, 7)


def test_what_is_given_beside_a_models_own_optimizer_wins_and_the_rest_of_it_stays():
    own = keras.optimizers.SGD(0.5, momentum=0.9)
    config = changed(own, clip_norm=2.0, schedule="cosine").get_config()
    assert (config["momentum"], config["global_clipnorm"]) == (0.9, 2.0)
    assert config["learning_rate"]["config"]["initial_learning_rate"] == 0.5
    scaled = changed(keras.optimizers.LossScaleOptimizer(own), momentum=0.5)
    assert isinstance(scaled, keras.optimizers.LossScaleOptimizer)
    assert scaled.inner_optimizer.momentum == 0.5
    assert isinstance(changed(own, optimizer="adam", clip_norm=1.0), keras.optimizers.Adam)


@pytest.mark.parametrize("values", [{"learning_rate": 0.25}, {"schedule": "cosine"}])
def test_a_rate_replaces_no_schedule_of_a_models_own(values):
    own = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.5, 10))
    with pytest.raises(ValueError, match="have no effect: .* give `optimizer` as well"):
        changed(own, **values)


@pytest.mark.parametrize("warmup_steps, first", [(0, 0.5), (4, 0)])
def test_a_warm_up_is_shown_by_the_rate_at_its_end(warmup_steps, first):
    values = {"learning_rate": 0.5, "schedule": "linear", "warmup_steps": warmup_steps}
    optimizer = made(**values)
    assert float(optimizer.learning_rate) == first
    assert shown_rate(optimizer, TrainConfig(**values)) == pytest.approx(0.5)


# Learning-rate schedules
def schedule_of(schedule, warmup_steps=0, epochs=EPOCHS):
    config = TrainConfig(schedule=schedule, warmup_steps=warmup_steps, epochs=epochs)
    return make_schedule(config, RATE, STEPS)


@pytest.mark.parametrize("warmup_steps", [0, 8])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "step:1,3", "constant"])
def test_the_rates_of_all_steps_also_when_the_schedule_comes_back_from_json(schedule, warmup_steps):
    count = 40 - warmup_steps
    after = {
        "cosine": [RATE * (1 + math.cos(math.pi * n / count)) / 2 for n in range(count)],
        "linear": [RATE * (1 - n / count) for n in range(count)],
        "step:1,3": ([RATE] * 10 + [RATE / 10] * 20 + [RATE / 100] * 10)[warmup_steps:],
        "constant": [RATE] * count,
    }[schedule]
    expected = [RATE * step / warmup_steps for step in range(warmup_steps)] + after
    found = schedule_of(schedule, warmup_steps)
    if schedule == "constant" and not warmup_steps:
        assert found == RATE
        return
    schedules = keras.optimizers.schedules
    for each in (found, schedules.deserialize(schedules.serialize(found))):
        np.testing.assert_allclose([float(each(s)) for s in range(40)], expected, 1e-5, 1e-7)


def test_a_warm_up_of_the_whole_run_is_refused():
    with pytest.raises(ValueError, match=r"warmup_steps \(40\) must be fewer than .*: 40, 10 an"):
        schedule_of("cosine", 40)
    assert float(schedule_of("linear", epochs=0)(0)) == RATE  # a run without a step


@pytest.mark.parametrize("scaled", [False, True])
def test_a_file_holds_what_comes_after_the_warm_up(scaled):
    optimizer = inner = keras.optimizers.SGD(schedule_of("step:2", 8))
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(inner)
    with plain_schedule(optimizer):
        assert inner.get_config()["learning_rate"]["module"] == "keras.optimizers.schedules"
        assert float(inner.learning_rate) == RATE
    assert float(inner.learning_rate) == 0
    assert inner.get_config()["learning_rate"]["class_name"] == "WarmUp"
    for rate in (0.25, keras.optimizers.schedules.CosineDecay(0.25, 3)):  # left alone
        other = keras.optimizers.SGD(rate)
        with plain_schedule(other):
            assert float(other.learning_rate) == 0.25
