"""Hand-made events -> phases."""

import pytest

from towers.app.diagnosis import phases
from towers.app.diagnosis.phases import Interval, TowerSpan
from towers.app.diagnosis.recording import HOST, Event

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
        (gpu("fusion_3", hlo_module="a_inference_sum_and_update_program_1032__.1"), "update"),
        (gpu("fusion_3", hlo_module="a_inference_update_program_1032__.1"), "update"),
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


def test_events_count_for_the_phase_whose_time_it_is_as_they_begin():
    in_phases = dict.fromkeys(phases.PHASES, []) | {
        "input": [Interval(10, 12)], "towers": [Interval(13, 16)], "sum": [Interval(15, 18)],
    }
    begins = [9, 10, 12, 13, 15, 15.5, 16, 17, 18, 21, 22]  # before the step, ..., after it
    assert phases.phase_events(in_phases, Interval(10, 22), begins) == {
        "input": 1, "parameters": 0, "towers": 3, "sum": 2, "update": 0, "host": 3
    }


def per_phase(*values):
    return dict(zip(phases.PHASES, values, strict=True))


def near(values):
    return pytest.approx(values, rel=1e-9, abs=1e-15)


def test_recording_is_taken_off_by_events_however_long_a_phase_is():
    seconds = per_phase(0.002, 0.001, 0.080, 0.001, 0.030, 0.006)  # 0.120
    events = per_phase(0, 1000, 18000, 0, 0, 1000)
    assert phases.unrecorded(seconds, events, 0.110) == near(
        per_phase(0.002, 0.0005, 0.071, 0.001, 0.030, 0.0055)
    )


def test_a_phase_with_less_time_than_its_events_cost_leaves_the_rest_to_the_others():
    seconds = per_phase(0.001, 0.002, 0.080, 0.0, 0.030, 0.007)  # 0.120
    events = per_phase(0, 10000, 18000, 2000, 0, 2000)
    # Of 10 ms for 32,000 events: parameters give their 2, the sum its 0; the others 8 for 20,000.
    assert phases.unrecorded(seconds, events, 0.110) == near(
        per_phase(0.001, 0.0, 0.0728, 0.0, 0.030, 0.0062)
    )


def test_what_events_cannot_have_cost_scales_all_phases():
    seconds = per_phase(0.010, 0.020, 0.080, 0.0, 0.0, 0.010)  # 0.120
    few = per_phase(0, 10000, 0, 0, 0, 0)  # 10 ms at most; 110 are left
    assert phases.unrecorded(seconds, few, 0.055) == near(
        per_phase(0.005, 0.005, 0.040, 0.0, 0.0, 0.005)
    )


def test_a_step_that_was_shorter_under_the_profiler_scales_all_phases():
    seconds = per_phase(0.010, 0.020, 0.060, 0.0, 0.0, 0.010)  # 0.100
    assert phases.unrecorded(seconds, per_phase(*[1000] * 6), 0.120) == near(
        per_phase(0.012, 0.024, 0.072, 0.0, 0.0, 0.012)
    )


def test_additions_take_their_share_of_the_update_at_most_all():
    seconds = dict.fromkeys(phases.PHASES, 0.0) | {"sum": 1.0, "update": 4.0}
    assert phases.split_update(seconds, 0.25) == seconds | {"sum": 2.0, "update": 3.0}
    assert phases.split_update(seconds, 1.5) == seconds | {"sum": 5.0, "update": 0.0}


def test_a_step_lasts_until_the_next_waits_for_input_and_the_last_is_left_out():
    events = [host("towers.input", t, t + 1) for t in (30, 10, 20)] + [host("towers.step", 11, 15)]
    assert phases.steps(events) == [Interval(10, 20), Interval(20, 30)]


def tower_intervals(events, tower_devices, logical_gpus):
    streams = phases.computing_streams(events, tower_devices, logical_gpus)
    return phases.tower_intervals(events, tower_devices, streams)


def test_towers_of_a_gpu_are_one():
    found = tower_intervals([gpu("kernel", index=1)], GPUS, [1, 1])
    assert found == {(2, 3): [Interval(0, 1)]}
    call = host("tower_1/PartitionedCall:PartitionedCall")
    assert tower_intervals([call], CPUS, []) == {(1, 1): [Interval(0, 1)]}


def kernel(stream, begin, index=0, name="kernel"):
    return gpu(name, index)._replace(
        line=f"Stream #{stream}(Compute) {stream}", begin=begin, end=begin + 1.0
    )


def test_logical_gpus_are_told_by_their_streams_in_the_order_of_their_numbers():
    devices = [f"/gpu:{i}" for i in (1, 1, 2, 4)]  # the GPUs are divided into 3 and 2
    events = [kernel(104, 5), kernel(21, 3), kernel(30, 9, name="MemcpyH2D"), kernel(7, 0, 1)]
    assert tower_intervals(events, devices, [3, 2]) == {
        (0, 1): [Interval(3, 4)], (2, 2): [Interval(5, 6)], (3, 3): [Interval(0, 1)],
    }


def test_streams_that_cannot_be_told_apart_count_for_all_the_devices_of_their_gpu():
    events = [kernel(13, 0), kernel(14, 2), kernel(15, 4)]
    found = tower_intervals(events, ["/gpu:0", "/gpu:1"], [2])
    assert found == {(0, 1): [Interval(t, t + 1) for t in (0, 2, 4)]}


def test_spans_are_means_over_steps_from_their_begins():
    intervals = {(1, 1): [Interval(12, 14), Interval(15, 16), Interval(24, 28)]}
    spans = [phases.tower_spans(intervals, Interval(t, t + 10)) for t in (10, 20)]
    assert spans == [{(1, 1): Interval(2, 6)}, {(1, 1): Interval(4, 8)}]
    assert phases.mean_spans(spans, CPUS) == [TowerSpan((1, 1), "/cpu:1", 3, 7)]
    assert phases.mean_spans(spans, CPUS, 0.5) == [TowerSpan((1, 1), "/cpu:1", 1.5, 3.5)]


def test_the_middle_half_leaves_out_the_fastest_and_the_slowest_quarter():
    assert phases.typical([5, 1, 9, 3, 4, 2, 8, 7]) == [3, 4, 0, 7]
    assert phases.typical([5]) == [0]


def test_a_union_has_no_instant_twice():
    joined = phases.union([Interval(3, 4), Interval(0, 2), Interval(1, 3), Interval(6, 7)])
    assert joined == [Interval(0, 4), Interval(6, 7)]
    assert phases.length(joined) == 5
