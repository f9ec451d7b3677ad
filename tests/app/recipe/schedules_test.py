"""Learning-rate schedules: their values, by hand; and what of them a file holds."""

import math

import keras
import numpy as np
import pytest

from towers.app.config import TrainConfig
from towers.app.recipe.schedules import (
    Length,
    WarmUp,
    make_schedule,
    plain_schedule,
    schedule_notes,
)

LENGTH = Length(num_steps=40, steps_an_epoch=10)
RATE = 0.5


def rates(schedule, warmup_steps=0, length=LENGTH):
    made = make_schedule(TrainConfig(schedule=schedule, warmup_steps=warmup_steps), RATE, length)
    return [float(made(step)) for step in range(length.num_steps)]


def warm(after, warmup_steps):
    """after[0] is the rate of update `warmup_steps`."""
    return [RATE * step / warmup_steps for step in range(warmup_steps)] + after


@pytest.mark.parametrize("warmup_steps", [0, 8])
def test_cosine_and_linear_fall_from_the_rate_towards_0_after_the_last_step(warmup_steps):
    count = 40 - warmup_steps
    cosine = [RATE * (1 + math.cos(math.pi * n / count)) / 2 for n in range(count)]
    line = [RATE * (1 - n / count) for n in range(count)]
    for schedule, after in (("cosine", cosine), ("linear", line)):
        np.testing.assert_allclose(
            rates(schedule, warmup_steps), warm(after, warmup_steps), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("warmup_steps", [0, 8])
def test_steps_come_after_their_epochs_and_are_a_tenth(warmup_steps):
    expected = [RATE] * 10 + [RATE / 10] * 20 + [RATE / 100] * 10
    found = rates("step:1,3", warmup_steps)
    np.testing.assert_allclose(found, warm(expected[warmup_steps:], warmup_steps), rtol=1e-6)


def test_constant_is_a_number_and_with_a_warm_up_a_schedule():
    assert make_schedule(TrainConfig(), RATE, LENGTH) == RATE
    np.testing.assert_allclose(rates("constant", 8), warm([RATE] * 32, 8), rtol=1e-6)


def test_a_warm_up_of_the_whole_run_is_refused():
    with pytest.raises(ValueError, match=r"warmup_steps \(40\) must be fewer than .*: 40, 10 an"):
        rates("cosine", 40)


def test_a_run_without_a_step_has_a_schedule_all_the_same():
    assert float(make_schedule(TrainConfig(schedule="linear"), RATE, Length(0, 10))(0)) == RATE


def test_a_warm_up_comes_back_from_its_json():
    schedules = keras.optimizers.schedules
    made = make_schedule(TrainConfig(schedule="linear", warmup_steps=8), RATE, LENGTH)
    copy = schedules.deserialize(schedules.serialize(made))
    assert isinstance(copy, WarmUp) and copy is not made
    assert [float(copy(s)) for s in range(40)] == [float(made(s)) for s in range(40)]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_file_holds_what_comes_after_the_warm_up(scaled):
    made = make_schedule(TrainConfig(schedule="step:2", warmup_steps=8), RATE, LENGTH)
    optimizer = inner = keras.optimizers.SGD(made)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(inner)
    with plain_schedule(optimizer):
        assert inner.get_config()["learning_rate"]["module"] == "keras.optimizers.schedules"
        assert float(inner.learning_rate) == RATE
    assert float(inner.learning_rate) == 0
    assert inner.get_config()["learning_rate"]["class_name"] == "WarmUp"


def test_other_learning_rates_are_left_alone():
    for rate in (0.25, keras.optimizers.schedules.CosineDecay(0.25, 3)):
        optimizer = keras.optimizers.SGD(rate)
        with plain_schedule(optimizer):
            assert float(optimizer.learning_rate) == 0.25


@pytest.mark.parametrize("schedule, warmup_steps, words", [
    ("constant", 5, ["learning rate: from 0 up over 5 updates"]),
    ("cosine", 5, ["learning rate: from 0 up over 5 updates, then cosine to 0 at update 40"]),
    ("step:1,3", 0, ["learning rate: a tenth after epoch 1, 3"]),
])
def test_the_schedule_in_words(schedule, warmup_steps, words):
    config = TrainConfig(schedule=schedule, warmup_steps=warmup_steps)
    assert schedule_notes(config, LENGTH) == words
