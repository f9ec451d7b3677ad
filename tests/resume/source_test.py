"""How examples are fed to a run, by default as its configuration has it."""

import pytest

from towers.app.config import TrainConfig
from towers.resume.source import InputOptions, num_steps


def test_the_defaults_are_those_of_a_run():
    config = TrainConfig()
    assert InputOptions() == tuple(getattr(config, name) for name in InputOptions._fields)


@pytest.mark.parametrize(("num_examples", "expected"), [(1, 1), (10, 1), (11, 2), (20, 2)])
def test_the_last_partial_batch_is_a_step(num_examples, expected):
    assert num_steps(num_examples, batch_size=10) == expected
