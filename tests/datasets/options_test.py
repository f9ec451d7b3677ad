"""How examples are fed to a run, by default as its configuration has it."""

from towers.config import TrainConfig
from towers.datasets.options import InputOptions


def test_the_defaults_are_those_of_a_run():
    config = TrainConfig()
    assert InputOptions() == tuple(getattr(config, name) for name in InputOptions._fields)
