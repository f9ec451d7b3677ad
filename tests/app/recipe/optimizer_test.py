"""The optimizer of a configuration: found by name, with the arguments that flags ask for."""

import keras
import pytest

from towers.app.config import TrainConfig
from towers.app.recipe.optimizer import given, learning_rate, make_optimizer, shown_rate, with_given
from towers.app.recipe.schedules import Length

LENGTH = Length(40, 10)


def made(name="sgd", **values):
    return make_optimizer(TrainConfig(**values), name, LENGTH)


def test_an_optimizer_is_found_by_name_in_any_case_with_its_own_default_rate():
    assert float(made("SGD").learning_rate) == pytest.approx(0.01)
    scaled = made("rmsprop", learning_rate=0.5, precision="mixed_float16")
    assert isinstance(scaled, keras.optimizers.LossScaleOptimizer)
    assert float(scaled.inner_optimizer.learning_rate) == 0.5
    assert learning_rate(TrainConfig(), keras.optimizers.Adam) == 0.001


@pytest.mark.parametrize("name", ["Optimizer", "LossScaleOptimizer", "get"])
def test_what_is_no_optimizer_by_itself_is_refused(name):
    with pytest.raises(ValueError, match="^optimizer "):
        made(name)


def test_flags_are_keras_arguments_and_without_them_its_defaults_stay():
    config = made(
        momentum=0.9, weight_decay=0.01, clip_norm=2.0, ema=0.99, schedule="cosine"
    ).get_config()
    names = "momentum", "weight_decay", "global_clipnorm", "use_ema", "ema_momentum"
    assert [config[name] for name in names] == [0.9, 0.01, 2.0, True, 0.99]
    assert config["learning_rate"]["class_name"] == "CosineDecay"
    assert made().get_config() | {"name": ""} == keras.optimizers.SGD().get_config() | {"name": ""}


@pytest.mark.parametrize("name", ["adam", "adamw", "lion"])
def test_momentum_of_an_optimizer_without_any_is_refused(name):
    with pytest.raises(ValueError, match=rf"^momentum \(0.9\): {name} has none. Use optimizer=sgd"):
        made(name, momentum=0.9)


def changed(own, **values):
    return with_given(own, TrainConfig(**values), LENGTH)


def test_a_models_own_optimizer_stays_where_nothing_or_the_rate_alone_is_given():
    own = keras.optimizers.SGD(0.5, momentum=0.9)
    own.build([keras.Variable([1.0])])
    own.iterations.assign(7)
    assert changed(own, label_smoothing=0.1) is own and float(own.learning_rate) == 0.5
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
    assert given(TrainConfig(clip_norm=2.0, schedule="cosine")) == ["schedule", "clip_norm"]


@pytest.mark.parametrize("values", [{"learning_rate": 0.25}, {"schedule": "cosine"}])
def test_a_rate_replaces_no_schedule_of_a_models_own(values):
    own = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.5, 10))
    with pytest.raises(ValueError, match="have no effect: .* give `optimizer` as well"):
        changed(own, **values)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_a_warm_up_is_shown_by_the_rate_at_its_end(schedule):
    values = {"learning_rate": 0.5, "schedule": schedule}
    warm = {**values, "warmup_steps": 4}
    assert float(made(**warm).learning_rate) == 0
    assert shown_rate(made(**warm), TrainConfig(**warm)) == pytest.approx(0.5)
    assert shown_rate(made(**values), TrainConfig(**values)) == 0.5
