"""The names of a step's scopes and programs, told from what TensorFlow makes of them."""

import keras
import numpy as np
import pytest

from towers.machine import policy
from towers.step import TowerStep, scopes


@pytest.mark.parametrize("name, scope, tower", [
    ("split/Shape:Shape", "split", None),
    ("tower_0/PartitionedCall:PartitionedCall", "tower_0", 0),
    ("tower_12/PartitionedCall:PartitionedCall", "tower_12", 12),
    ("tower_3_1/PartitionedCall:PartitionedCall", "tower_3", 3),  # the second one of that name
    ("update_1/AssignVariableOp:AssignVariableOp", "update", None),
    ("cond/then/_0/cond/update/mul:Mul", "update", None),  # behind a condition
    ("weights/cond/sum/x:Mul", "weights", None),  # the outermost counts
    ("my_tower_3/x:Mul", None, None),
    ("tower_x/x:Mul", None, None),
    ("summary/x:Mul", None, None),
    ("sum:Sum", None, None),  # a node, no scope
])
def test_the_outermost_scope_counts_however_it_was_made_unique(name, scope, tower):
    assert scopes.outermost(name) == scope
    assert scopes.tower_index(name) == tower


def test_a_towers_scope_is_found_again_by_its_index():
    for index in (0, 7, 10, 123):
        assert scopes.tower_index(f"{scopes.tower(index)}/node:Type") == index


@pytest.mark.parametrize("name, expected", [
    ("cond/then/_0/cond/update/PartitionedCall/sum/add:AddV2", True),
    ("update/PartitionedCall/sum/add:AddV2", True),
    ("sum/add:AddV2", False),  # before the update
    ("update/StatefulPartitionedCall:StatefulPartitionedCall", False),
    ("tower_0/sum/add:AddV2", False),  # a layer's name
])
def test_additions_of_the_update_are_seen_where_they_are_not_compiled(name, expected):
    assert scopes.is_addition(name) is expected


@pytest.mark.parametrize("text, program", [
    ("a_inference_update_program_1032__.1", "update_program"),
    ("a_inference_sum_and_update_program_1032__.1", "sum_and_update_program"),
    ("cluster_0", None),
    ("a_inference_my_update_programs_1", None),
])
def test_a_program_is_told_from_the_name_that_its_kernels_carry(text, program):
    assert scopes.program(text) == program


def test_a_step_writes_these_names_and_calls_nothing_outside_of_them():
    """Its outermost operations beside them are few: the metrics, and what goes in and out."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    step = TowerStep(
        model, "adam", "mse", devices=["/cpu:0", "/cpu:1"], num_towers=4, policy=policy.GPU
    )
    step(np.ones((5, 4), "float32"), np.ones((5, 2), "float32"))
    nodes = step.update_graph().node
    towers = {scopes.tower(t) for t in range(4)}
    assert {scopes.outermost(node.name) for node in nodes} - {None} == {
        *towers, "split", "parameters", "weights", "sum", "update"
    }
    calls = {scopes.outermost(node.name) for node in nodes if "PartitionedCall" in node.op}
    assert calls == {*towers, "update"}
