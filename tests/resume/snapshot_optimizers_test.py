"""What a script has told an optimizer, and what callbacks have made of it since."""

import keras
import pytest

from towers.resume.snapshot import compared

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def options(optimizer):
    with compared({"optimizer": optimizer}) as found:
        return found


@keras.saving.register_keras_serializable("tests.optimizer_options")
class Untold(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without get_config."""

    def __call__(self, step):
        return 0.1


def a_rate():
    return 0.1


@pytest.mark.parametrize("make, expected", [
    (lambda: SGD(0.1, momentum=0.9), {"learning_rate": 0.1, "momentum": 0.9, "nesterov": False}),
    (lambda: SGD(keras.optimizers.schedules.CosineDecay(0.1, 8)),
     {"learning_rate": "CosineDecay", "learning_rate.decay_steps": 8}),
    (lambda: keras.optimizers.LossScaleOptimizer(Adam(0.2)),
     {"inner_optimizer": "Adam", "inner_optimizer.learning_rate": 0.2}),
    (lambda: SGD(a_rate), {"learning_rate": "a_rate"}),
    (lambda: SGD(lambda: 0.1), {"momentum": 0.0}),
])
def test_all_that_can_be_told_of_an_optimizer_is_compared(make, expected):
    found = options(make())
    assert found.items() >= {f"optimizer.{name}": value for name, value in expected.items()}.items()
    assert options(make()) == found  # names count the objects of a process


def test_what_cannot_be_told_is_left_out_and_other_values_too():
    assert options(SGD(Untold())) == {}
    assert "optimizer.learning_rate" not in options(SGD(lambda: 0.1))
    with compared({"optimizer": "sgd", "second": SGD(0.3), "layers": []}) as found:
        assert {name.split(".")[0] for name in found} == {"second"}


def test_what_callbacks_set_within_is_not_the_scripts_and_what_is_set_between_is():
    optimizer = SGD(0.5)
    with compared({"optimizer": optimizer}) as first:
        optimizer.learning_rate = 0.25
    assert options(optimizer) == first
    optimizer.learning_rate = 0.125
    assert options(optimizer) == {**first, "optimizer.learning_rate": 0.125}
