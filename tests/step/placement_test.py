"""Where a model is: a strategy says what it refuses, and users see the real parameters."""

import dataclasses
import inspect

import pytest

import towers
from towers.divide.machines import Machine
from towers.machine import choices
from towers.machine.devices import CPU, GPU
from towers.step.exchange import LocalExchange
from towers.step.placement import Placement


@pytest.mark.parametrize("name", choices.STRATEGIES)
def test_a_strategy_goes_with_stages_unless_its_entry_says_why_not(name):
    reason = choices.STRATEGIES[name].refuses_stages
    assert Placement(name).num_groups(6) == 6
    if not reason:
        assert Placement(name, 3).num_groups(6) == 2
        return
    with pytest.raises(ValueError) as error:
        Placement(name, gpus_per_tower=3)
    assert str(error.value) == f"gpus_per_tower (3) does not go with strategy={name}: {reason}"


@pytest.mark.parametrize("name", choices.STRATEGIES)
def test_copies_are_made_where_devices_have_memories_of_their_own(name):
    assert Placement(name).makes_copies(GPU) is choices.STRATEGIES[name].has_copies
    assert not Placement(name).makes_copies(CPU)


@pytest.mark.parametrize(
    "field, value, error",
    [
        ("batch_norm", "mean", "'mean'.* must be one of average, synchronized, tower0"),
        ("strategy", "everywhere", "'everywhere'.* must be one of parameter_server"),
        ("add_on", "gpu", "'gpu'.* must be one of auto, cpu"),
        ("gpus_per_tower", 1.5, r"gpus_per_tower \(1.5\) must be an integer"),
        ("towers_per_device", [3, 0], r"towers_per_device \(\[3, 0\]\) must be a list with"),
        ("towers_per_device", "3,1", "must be a list with the number of towers on each"),
        ("stages", ["a", "b"], r"stages \(a, b\) must name 0 layers.*gpus_per_tower=3"),
    ],
)
def test_no_placement_has_a_wrong_field_not_even_later(field, value, error):
    with pytest.raises(ValueError, match=error):
        Placement(**{field: value})
    with pytest.raises(ValueError, match=error):
        dataclasses.replace(Placement(), **{field: value})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Placement(), field, value)


def test_a_step_runs_only_where_each_tower_has_one_device():
    with pytest.raises(AssertionError, match="one device for each tower"):
        Machine(["/cpu:0"], LocalExchange(2))


@pytest.mark.parametrize("function", [towers.TowerStep, towers.make_parallel])
def test_editors_and_help_show_the_parameters(function):
    """The fields of a placement among them, with the same defaults but for batch_norm."""
    shown = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in shown.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    for field in dataclasses.fields(Placement):
        assert shown[field.name].default in (field.default, None), field.name
    assert all(f"{name}:" in inspect.getdoc(function) for name in shown if name != "optimizer")
