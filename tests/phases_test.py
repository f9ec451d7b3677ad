"""Hand-made events -> phases."""

import pytest

from towers import phases
from towers.phases import Interval, TowerSpan
from towers.trace import HOST, Event

CPUS, GPUS = ["/cpu:0", "/cpu:1"], ["/gpu:0", "/gpu:0", "/gpu:1", "/gpu:1"]


def host(name, begin=0.0, end=1.0):
    return Event(HOST, "a thread", name, begin, end)


def gpu(name, index=0, **details):
    return Event(f"/device:GPU:{index}", "Stream #7", name, 0.0, 1.0, details)


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("towers.input", "input"),
        ("split/unstack:Split", "parameters"),
        ("weights_1/truediv:RealDiv", "parameters"),
        ("parameters/ReadVariableOp_3:ReadVariableOp", "parameters"),
        ("tower_1/PartitionedCall:PartitionedCall", "towers"),
        ("tower_1/PartitionedCall/_43:_Send", "sum"),  # its output, on its way to the CPU
        ("sum/add_2:AddV2", "sum"),
        ("update/StatefulPartitionedCall:StatefulPartitionedCall", "update"),
        ("update/StatefulPartitionedCall/sum/add_3:AddV2", "sum"),  # not compiled
        ("cond/then/_0/cond/update/StatefulPartitionedCall:StatefulPartitionedCall", "update"),
        ("update_1/AssignVariableOp:AssignVariableOp", "update"),
        ("tower_1/PartitionedCall/sum/add:AddV2", "towers"),  # a layer's name, in an inlined tower
        ("sum_1:Sum", None),
        ("towers.step", None),
        ("cnn/conv2d/Conv2D:Conv2D", None),  # inside of the tower's operation
    ],
)
def test_an_operation_belongs_to_the_phase_of_its_scope(name, phase):
    assert phases.phase_of(host(name), CPUS) == phase


@pytest.mark.parametrize(
    ("event", "phase"),
    [
        (gpu("MemcpyH2D"), "parameters"),
        (gpu("MemcpyD2H"), "sum"),
        (gpu("MemcpyP2P"), "parameters"),  # from the first GPU, where the parameters may be
        (gpu("MemcpyP2P", index=1), "sum"),
        (gpu("MemcpyD2D"), "towers"),
        (gpu("implicit_gemm", tf_op="cnn/conv2d/Conv2D:Conv2D"), "towers"),
        (gpu("add_kernel", tf_op="sum/add:AddV2"), "sum"),
        (gpu("fusion_3", hlo_module="a_inference_average_and_apply_1032__.1"), "update"),
        (host("tower_1/PartitionedCall:PartitionedCall"), None),  # only sends work to the GPU
    ],
)
def test_on_gpus_copies_count_by_direction_and_kernels_as_the_towers_own(event, phase):
    assert phases.phase_of(event, GPUS) == phase


def test_an_instant_counts_once_and_the_towers_come_first():
    in_phases = {
        "input": [Interval(10, 11)],
        "parameters": [Interval(11.5, 14)],
        "towers": [Interval(13, 16), Interval(15, 18)],
        "sum": [Interval(17, 19), Interval(20, 20.5), Interval(30, 31)],  # the last: the next step
        "update": [Interval(17.5, 20)],
    }
    assert phases.phase_seconds(in_phases, Interval(10, 22)) == {
        "input": 1, "parameters": 1.5, "towers": 5, "sum": 0.5, "update": 2, "host": 2
    }


def test_additions_take_their_share_of_the_update_at_most_all():
    seconds = dict.fromkeys(phases.PHASES, 0.0) | {"sum": 1.0, "update": 4.0}
    assert phases.split_update(seconds, 0.25) == seconds | {"sum": 2.0, "update": 3.0}
    assert phases.split_update(seconds, 1.5) == seconds | {"sum": 5.0, "update": 0.0}


def test_a_step_lasts_until_the_next_waits_for_input_and_the_last_is_left_out():
    events = [host("towers.input", t, t + 1) for t in (30, 10, 20)] + [host("towers.step", 11, 15)]
    assert phases.steps(events) == [Interval(10, 20), Interval(20, 30)]


def test_additions_of_the_update_are_seen_where_they_are_not_compiled():
    assert phases.has_own_sum(host("cond/then/_0/cond/update/PartitionedCall/sum/add:AddV2"))
    assert not phases.has_own_sum(host("sum/add:AddV2"))
    assert not phases.has_own_sum(host("update/StatefulPartitionedCall:StatefulPartitionedCall"))


def test_towers_of_a_gpu_are_one():
    assert phases.tower_intervals([gpu("kernel", index=1)], GPUS) == {(2, 3): [Interval(0, 1)]}
    call = host("tower_1/PartitionedCall:PartitionedCall")
    assert phases.tower_intervals([call], CPUS) == {(1, 1): [Interval(0, 1)]}


def test_spans_are_means_over_steps_from_their_begins():
    intervals = {(1, 1): [Interval(12, 14), Interval(15, 16), Interval(24, 28)]}
    spans = [phases.tower_spans(intervals, Interval(t, t + 10)) for t in (10, 20)]
    assert spans == [{(1, 1): Interval(2, 6)}, {(1, 1): Interval(4, 8)}]
    assert phases.mean_spans(spans, CPUS) == [TowerSpan((1, 1), "/cpu:1", 3, 7)]


def test_the_middle_half_leaves_out_the_fastest_and_the_slowest_quarter():
    assert phases.typical([5, 1, 9, 3, 4, 2, 8, 7]) == [3, 4, 0, 7]
    assert phases.typical([5]) == [0]


def test_a_union_has_no_instant_twice():
    joined = phases.union([Interval(3, 4), Interval(0, 2), Interval(1, 3), Interval(6, 7)])
    assert joined == [Interval(0, 4), Interval(6, 7)]
    assert phases.length(joined) == 5
