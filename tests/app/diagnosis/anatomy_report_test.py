"""The table, and the advice for anatomies made by hand."""

from pathlib import Path

import pytest

from towers.app.diagnosis import anatomy_report
from towers.app.diagnosis.anatomy import Anatomy
from towers.app.diagnosis.phases import PHASES, TowerSpan
from towers.app.diagnosis.plan import Traffic


def make_anatomy(milliseconds, kind="cpu", home="/cpu:0", num_devices=2, examples=(16, 16)):
    devices = [f"/{kind}:{i}" for i in range(num_devices)]
    seconds = {p: m / 1e3 for p, m in zip(PHASES, milliseconds, strict=True)}
    spans = [TowerSpan((t, t), d, 0.010, 0.050 + 0.020 * t) for t, d in enumerate(devices)]
    rows = [
        Traffic(d, (t, t), [examples[t]], 4000, 500, 4000, 20, 9, 4) for t, d in enumerate(devices)
    ]
    total = sum(seconds.values())
    return Anatomy(seconds, total, 1.2 * total, 20, sum(examples), spans, rows, home)


def test_the_table_has_bars_for_shares_and_the_bytes_that_move():
    assert anatomy_report.table(make_anatomy([0, 10, 60, 20, 4, 6])) == [
        "phase of a step                        ms  share",
        "waiting for input                    0.00     0%",
        "parameters and shards to devices    10.00    10%  ===                             9.0 kB",
        "towers' forward and backward        60.00    60%  ==================",
        "gradients to /cpu:0, their sum      20.00    20%  ======                          8.0 kB",
        "update on /cpu:0                     4.00     4%  =",
        "host overhead                        6.00     6%  ==",
        "all phases                         100.00   a step without the profiler, 320 examples/s",
        "the profiler adds 20.00 ms (20%), taken off again: at most 1 us for each event, "
        "the rest by time",
        "1.7 towers at once, of 2; the fastest takes 40.00 ms, the slowest 60.00 ms",
    ]


def test_a_step_that_was_shorter_under_the_profiler_is_told():
    anatomy = make_anatomy([0, 10, 60, 20, 4, 6])._replace(profiled_seconds=0.097)
    assert (
        "under the profiler 3.00 ms (3%) shorter: all phases are scaled to the step without"
        in anatomy_report.table(anatomy)
    )


@pytest.mark.parametrize(
    ("milliseconds", "named", "change"),
    [
        ([90, 1, 5, 1, 1, 2], "waiting for input, 90%", "input pipeline"),
        ([1, 90, 5, 1, 1, 2], "parameters and shards to devices, 90%", "--variable_device=gpu"),
        ([1, 5, 1, 90, 1, 2], "gradients to /cpu:0, their sum, 90%", "fewer towers"),
        ([1, 5, 1, 1, 90, 2], "update on /cpu:0, 90%", "--batch_size"),
        ([1, 5, 1, 1, 2, 90], "host overhead, 90%", "--batch_size"),
        ([1, 5, 90, 1, 1, 2], "towers' forward and backward, 90%", "--precision=mixed_bfloat16"),
    ],
)
def test_the_longest_phase_is_named_with_what_to_change(milliseconds, named, change):
    (line,) = anatomy_report.advice(make_anatomy(milliseconds, kind="gpu"))
    assert line.startswith(f"{named}: ")
    assert change in line


def test_variables_go_to_a_gpu_only_where_towers_run_on_one_and_they_are_not_there_yet():
    on_cpus = make_anatomy([1, 5, 1, 90, 1, 2])
    there = make_anatomy([1, 5, 1, 90, 1, 2], kind="gpu", home="/gpu:0")
    for anatomy in (on_cpus, there):
        assert "--variable_device" not in anatomy_report.advice(anatomy)[0]


def test_a_second_phase_is_named_where_it_counts():
    first, second = anatomy_report.advice(make_anatomy([0, 10, 60, 20, 5, 5]))
    assert first.startswith("towers' forward and backward, 60%")
    assert second.startswith("then gradients to /cpu:0, their sum, 20%")


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, ["=1)"]), (2, ["=4)"]), (16, ["=16)", "=32)"])]
)
def test_on_cpus_one_and_two_towers_a_core_are_told_but_not_what_it_is(cores, counts, monkeypatch):
    monkeypatch.setattr(anatomy_report, "count_cores", lambda: cores)
    (line,) = anatomy_report.advice(make_anatomy([1, 1, 90, 1, 1, 1]))  # 2 towers
    assert [part[:part.index(")") + 1] for part in line.split("--num_towers")[1:]] == counts


def test_uneven_shards_are_told():
    uneven = make_anatomy([1, 1, 90, 1, 1, 1], examples=(4, 5))
    assert "--batch_size that the 2 towers divide" in anatomy_report.advice(uneven)[0]


def test_the_last_lines_name_the_bottleneck_and_the_traces():
    found = anatomy_report.lines(make_anatomy([90, 1, 5, 1, 1, 2]), Path("p"))
    lines = [str(line) for line in found]
    assert lines[10].startswith("Bottleneck waiting for input, 90%: ")
    assert lines[11].startswith("Traces     p/trace.json.gz for chrome://tracing")
