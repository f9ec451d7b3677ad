"""Learning-rate schedules: their values, by hand; and what of them a file holds."""

import math

import keras
import numpy as np
import pytest

from towers.app.config import TrainConfig
from towers.app.recipe.optimizer import Length, make_schedule, plain_schedule, schedule_notes

LENGTH = Length(num_steps=40, steps_an_epoch=10)
RATE = 0.5


def made(schedule, warmup_steps=0, length=LENGTH):
    return make_schedule(TrainConfig(schedule=schedule, warmup_steps=warmup_steps), RATE, length)


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
    found = made(schedule, warmup_steps)
    if schedule == "constant" and not warmup_steps:
        assert found == RATE
        return
    schedules = keras.optimizers.schedules
    for each in (found, schedules.deserialize(schedules.serialize(found))):
        np.testing.assert_allclose([float(each(s)) for s in range(40)], expected, 1e-5, 1e-7)


def test_a_warm_up_of_the_whole_run_is_refused():
    with pytest.raises(ValueError, match=r"warmup_steps \(40\) must be fewer than .*: 40, 10 an"):
        made("cosine", 40)
    assert float(made("linear", length=Length(0, 10))(0)) == RATE  # a run without a step


@pytest.mark.parametrize("scaled", [False, True])
def test_a_file_holds_what_comes_after_the_warm_up(scaled):
    optimizer = inner = keras.optimizers.SGD(made("step:2", 8))
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


@pytest.mark.parametrize("schedule, warmup_steps, words", [
    ("cosine", 5, "learning rate: from 0 up over 5 updates, then cosine to 0 at update 40"),
    ("step:1,3", 0, "learning rate: a tenth after epoch 1, 3"),
])
def test_the_schedule_in_words(schedule, warmup_steps, words):
    config = TrainConfig(schedule=schedule, warmup_steps=warmup_steps)
    assert schedule_notes(config, LENGTH) == [words]
