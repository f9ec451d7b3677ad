"""Tests that the benchmarks work, also on simulated GPUs. No test checks a speed."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from benchmarks import all as everything
from benchmarks import clocks, contender, exactness_tables, gpu, machine, process
from benchmarks import readme, rounds
from benchmarks.clocks import Clock
from benchmarks.gpu import FAILED, MEASURED, NOT_REACHED
from benchmarks.gpu_plan import TRANSFERS, Case, make_plan
from benchmarks.workloads import WORKLOADS
from tests.processes import children, has_ended

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]

ON_GPUS = {"on_gpu", "copies", "stages_2", "stages_4"}  # contenders that need GPUs


def tiny_dataset(num_batches, repeats=1):
    workload = WORKLOADS["tiny"]()
    return contender.make_dataset(*workload.data(num_batches), workload.batch_size, repeats)


def measured(speed, memory=100.0):
    return {"examples_per_second": speed, "peak_memory_mb": memory, "device": "CPU"}


def make_rows(num_devices=2, peer_speed=50.0):
    """Returns rows with the ratios 100/50, 90/22.5 and 80/80: by default 2, 4 and 1."""
    results = [
        {"towers": measured(100.0), "fit": measured(peer_speed)},
        {"towers": measured(90.0), "fit": measured(22.5)},
        {"towers": measured(80.0), "fit": measured(80.0, memory=70.6)},
    ]
    return rounds.compare(
        results, "towers", "examples_per_second", workload="tiny", num_devices=num_devices
    )


@pytest.mark.telling("towers", "fit", "mirrored")
@pytest.mark.parametrize("name", sorted({*contender.CONTENDERS} - ON_GPUS))
def test_a_contender_records_when_each_step_ends(name):
    clock = Clock()
    contender.make_trainer(name, WORKLOADS["tiny"](), 2).train(tiny_dataset(2, repeats=2), clock)
    assert len(clock.times) == 4
    assert sorted(clock.times) == clock.times


@pytest.mark.parametrize("name, changes", [("towers", True), ("limit", False)])
def test_only_the_limit_changes_no_parameter(name, changes):
    workload = WORKLOADS["tiny"]()
    model = workload.build()
    object.__setattr__(workload, "build", lambda: model)
    before = model.get_weights()
    contender.make_trainer(name, workload, 2).train(tiny_dataset(2), Clock())
    unchanged = [np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
    assert unchanged == [not changes] * 2


def test_ratios_are_taken_within_a_round_and_a_repeated_comparison_counts_once():
    rows = make_rows()
    assert [row["ratio"] for row in rows] == [2.0, 4.0, 1.0]
    assert {row["median_ratio"] for row in rows} == {2.0}  # mean: 2.33; of medians: 1.8
    assert [row["peer_peak_memory_mb"] for row in rows] == [100, 100, 71]
    assert rounds.table(rows).splitlines()[1].split() == [
        "tiny",
        "2",
        "towers",
        "90.0",
        "fit",
        "50.0",
        "2.00",
    ]
    rows += [*make_rows(num_devices=8), *make_rows(peer_speed=25.0)]
    assert [
        (len(group), group[0]["num_devices"], group[0]["peer_value"])
        for group in rounds.group_comparisons(rows)
    ] == [(3, 2, 25.0), (3, 8, 50.0)]


def test_every_other_round_runs_in_reverse_and_a_failing_peer_is_left_out(monkeypatch, capsys):
    order = []

    def run_process(function, limit, name):
        order.append(name)
        if name == "central":
            raise RuntimeError("BatchNormalization: no aggregation")
        return measured(50.0 if name == "fit" else 75.0)

    monkeypatch.setattr(rounds, "run_process", run_process)
    contenders = {name: {"name": name} for name in ("towers", "central", "fit")}
    rows = rounds.compare(
        rounds.run_rounds("contender.measure", contenders, 3), "towers", "examples_per_second"
    )
    assert order == ["towers", "central", "fit", "fit", "towers", "towers", "fit"]
    assert [(row["peer"], row["ratio"]) for row in rows] == [("fit", 1.5)] * 3
    assert capsys.readouterr().out.count("central is left out: BatchNormalization") == 1
    with pytest.raises(RuntimeError, match="no aggregation"):
        rounds.run_rounds("contender.measure", {"central": {"name": "central"}}, 1)


def test_the_error_of_a_failed_process_contains_its_exception():
    with pytest.raises(RuntimeError, match="No module named 'benchmarks.nothing'"):
        process.run_process("nothing.measure")
    written = 'I0000 oneDNN\nTraceback:\n  File "a.py"\nValueError: no\n\nbecause it is late\n'
    assert process.last_exception(written) == "ValueError: no\n\nbecause it is late"
    assert process.last_exception("FATAL Flags parsing error\n") == "FATAL Flags parsing error"


@pytest.mark.parametrize(
    "way, value, expected",
    [
        ("towers", "1e-10", "exact"),
        ("towers", "1e-9", "silently wrong"),
        ("mirrored", "nan", "silently wrong"),
        ("jax", "1e-7", "exact"),
        ("jax", "refused: ValueError: no", "error"),
        ("ddp", "hung", "hung"),
        ("ddp", "not offered", "not offered"),
    ],
)
def test_every_result_of_a_case_has_an_outcome(way, value, expected):
    assert exactness_tables.outcome(way, value) == expected
    rows = [{"contender": way, "value": value, "workload": "a case"}]
    counts = {row[0]: row[1:] for row in exactness_tables.count_outcomes(rows)}
    found = counts[exactness_tables.TITLES[way]]
    assert found == ["1" if name == expected else "0" for name in exactness_tables.OUTCOMES]
    with pytest.raises(LookupError, match="no row of a case"):
        exactness_tables.list_cases(rows)


def test_a_case_is_either_a_row_or_one_in_which_every_way_is_exact():
    table = [["a", "exact", "exact"], ["b", "exact", "0.1"], ["c", "error", "exact"]]
    assert exactness_tables.split_cases(table) == (table[1:], ["a"])
    text = readme.cases(readme.Results())
    assert text.count("\n| ") - 1 + int(re.search(r"the other (\d+) cases", text)[1]) == 40


def test_cases_end_in_a_difference_an_error_or_at_their_limit():
    names = "gradient accumulation", "custom step: SimCLR"

    def measure(**limit):
        found = process.run_process("exactness_ways.measure", way="mirrored", cases=names, **limit)
        return [found[name]["value"] for name in names]

    accumulation, contrast = measure()
    assert accumulation.startswith("refused: RuntimeError: ") and contrast > 1e-3
    assert measure(limit_of_case=0.01) == ["hung", "hung"]


def test_a_csv_with_other_columns_stays_unchanged(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text("pair,ratio\n0,1.0\n")
    with pytest.raises(ValueError, match="--out .* has other columns"):
        rounds.append_csv(path, make_rows())
    assert path.read_text() == "pair,ratio\n0,1.0\n"


def test_a_page_keeps_a_table_that_was_not_measured_and_a_command_of_all_measures_it(tmp_path):
    """`all.py` replaces the whole table of results, so no page may show more than it measures."""
    page = ROOT / "docs/measured.md"
    text = page.read_text("utf-8")
    empty = tmp_path / "results.csv"
    rows = readme.Results().all
    with empty.open("w", newline="") as file:
        writer = csv.DictWriter(file, rounds.COLUMNS)
        writer.writeheader()
        writer.writerow(next(row for row in rows if row["benchmark"] == "memory"))
    filled, missing = readme.fill_in(page, text, readme.Results(empty))
    assert [line.split("'")[1] for line in missing] == [
        name for name in readme.PAGES[page] if name != "machine"
    ]
    measured = {command.split(".")[0] for command, _ in everything.COMMANDS}
    measured |= {"exactness", exactness_tables.BENCHMARK}
    needed = {line.split("'", 2)[2].split()[1] for line in missing}
    assert needed <= measured


@pytest.mark.matrix
def test_all_benchmarks_run_with_small_models():
    """Takes 20 minutes."""
    done = subprocess.run(
        [sys.executable, "benchmarks/all.py", "--quick"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_throughput_counts_the_steps_after_the_first():
    assert clocks.throughput([20.0, 21.0, 23.0, 24.0], 128) == {
        "examples_per_second": 96.0,
        "timed_seconds": 4.0,
    }


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_figures_on_a_page_equal_the_results(page):
    text = page.read_text("utf-8")
    filled, _ = readme.fill_in(page, text, readme.Results())
    assert filled == text, "run python benchmarks/readme.py"
    name = readme.PAGES[page][0]
    with pytest.raises(ValueError, match=f"{page.name} has 0 places .* {name!r}"):
        readme.fill_in(page, text.replace(f"figures: {name}", "figures: no"), readme.Results())


TOWERS = Case("mlp41m", "float32", 1024, 8, "towers")
FIT = Case("mlp41m", "float32", 1024, 1, "fit")


def start(out, *flags):
    return subprocess.Popen(
        [sys.executable, "benchmarks/gpu.py", f"--out={out}", "--small", *flags],
        cwd=ROOT,
        env={**os.environ, "TOWERS_REHEARSE_GPUS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def measure_cases(out, cases=(TOWERS,), seconds=100.0, case_seconds=60.0):
    """Returns (the rows of gpu.csv, the printed lines)."""
    about = {
        "gpus": [],
        "nvidia_smi": [],
        "small": True,
        "command": "",
        **machine.describe_machine(),
    }
    table = {case: gpu.make_row(about, case, NOT_REACHED) for case in cases}
    deadline = time.monotonic() + seconds
    lines = list(gpu.measure_cases(out, table, about, deadline, case_seconds, timed_seconds=0.1))
    return list(gpu.read_table(out).values()), lines


def test_several_gpus_are_compared_with_one_at_the_same_global_batch():
    cases = set(make_plan(8))
    for case in cases:
        if case.contender in ("towers", "mirrored") and case.num_devices == 8:
            assert case._replace(contender="fit", num_devices=1) in cases


@pytest.mark.parametrize(
    "seconds, case_seconds, status, error",
    [(100.0, 0.5, FAILED, "took"), (0.5, 60.0, NOT_REACHED, "cut off: took")],
)
def test_a_case_that_takes_too_long_is_killed_and_recorded(
    tmp_path, monkeypatch, seconds, case_seconds, status, error
):
    started, popen = [], subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(process.subprocess, "Popen", start)
    monkeypatch.setattr(gpu, "MIN_CASE_SECONDS", 0.0)
    (row,), _ = measure_cases(tmp_path, seconds=seconds, case_seconds=case_seconds)
    assert row["status"] == status
    assert re.match(rf"{error} more than its 0.\d+ s; it last wrote: ", row["error"])
    assert [child.returncode for child in started] == [-signal.SIGKILL]
    assert TOWERS.contender in (tmp_path / "errors.txt").read_text()


def test_after_a_failed_case_the_next_one_is_measured(tmp_path, monkeypatch):
    def run_process(function, limit, contender, **arguments):
        if contender == "towers":
            raise process.ProcessError("failed", "ResourceExhaustedError: OOM\n when", "all")
        return {"ms_per_step": 2.0, "examples_per_second": 512_000.0, "first_step_seconds": 1.0}

    monkeypatch.setattr(gpu, "run_process", run_process)
    (failed, measured), lines = measure_cases(tmp_path, [TOWERS, FIT])
    assert "1 of 2  mlp41m, 1,024 on 8 devices: towers  failed: Resource" in lines[0]
    assert "2 of 2  mlp41m, 1,024 on 1 device: fit  ms_per_step 2.0  ex" in lines[1]
    assert (failed["status"], failed["error"]) == (FAILED, "ResourceExhaustedError: OOM when")
    assert (measured["status"], measured["examples_per_second"]) == (MEASURED, "512000.0")


def test_sigterm_ends_all_processes_and_keeps_the_csv(tmp_path):
    run = start(tmp_path, "--workloads=mlp41m")
    try:
        assert "cases on 1 CPU device rehearsing GPUs" in run.stdout.readline()
        while not (started := children(run.pid)):
            pass
        run.send_signal(signal.SIGTERM)
        out, error = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 128 + signal.SIGTERM and "ended by SIGTERM" in error
    assert all(map(has_ended, started))
    assert "not reached: mlp41m, 8 on 2 devices: mirrored" in out
    assert {row["status"] for row in gpu.read_table(tmp_path).values()} == {NOT_REACHED}


@pytest.mark.matrix
def test_a_complete_run_writes_its_files_and_a_second_run_adds_nothing(tmp_path):
    flags = ["--workloads=mlp41m", "--contenders=towers,fit,trip", "--timed_seconds=0.1"]
    run = start(tmp_path, *flags)
    out, error = run.communicate(timeout=400)
    assert run.returncode == 0, error[-3000:]
    assert f"5 of 5 cases measured: {tmp_path}" in out
    with (tmp_path / "gpu.csv").open(newline="") as file:
        rows = {(row["contender"], row["num_devices"]): row for row in csv.DictReader(file)}
    towers, fit, transfers = rows["towers", "2"], rows["fit", "1"], rows[TRANSFERS, "2"]
    assert float(towers["examples_per_second"]) > 0 and float(towers["first_step_seconds"]) > 0
    assert float(fit["many_towers_ratio"]) > 0 and fit["how"] == "no XLA"
    assert 0 < float(transfers["share_of_step"]) and float(transfers["up_mb"]) > 0
    assert {row["devices"].partition(",")[2] for row in rows.values()} == {
        " small models: no measure of speed"
    }
    assert json.loads((tmp_path / "machine.json").read_text())["rehearsal"] is True
    before = (tmp_path / "gpu.csv").read_bytes()
    out, _ = start(tmp_path, *flags).communicate(timeout=400)
    assert "5 of 5 cases measured" in out and "1 of" not in out
    assert (tmp_path / "gpu.csv").read_bytes() == before


def test_a_directory_with_figures_of_another_kind_raises_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TOWERS_REHEARSE_GPUS", "1")
    monkeypatch.setattr(gpu, "run_process", lambda function: {"gpus": [], "cuda": ""})
    for _ in range(2):
        assert gpu.record_machine(tmp_path, small=True)["small"] is True
    with pytest.raises(ValueError, match=r"another machine or kind .*differs in small\)"):
        gpu.record_machine(tmp_path, small=False)


def test_a_stopwatch_times_whole_steps_between_moments_when_devices_are_idle(monkeypatch):
    now = [0.0]

    def wait_for_the_gpu():
        now[0] += 0.5  # the rest of its work
        return now[0]

    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clocks, "synchronized_time", wait_for_the_gpu)
    watch = clocks.Stopwatch(warm_up_steps=2, warm_up_seconds=0.0, timed_seconds=3.0)
    watch.set_model(keras.Sequential())
    watch.model.stop_training = False
    steps = 0
    while not watch.model.stop_training:
        watch.on_train_batch_begin(steps)
        now[0] += 1.0
        steps += 1
    # The timing starts at 2.5, before step 2, and ends at 5.5 + 0.5, after step 4.
    assert (watch.num_steps, watch.seconds, steps) == (3, 3.5, 6)


def test_ratios_compare_rows_with_the_same_global_batch():
    transfers, one = TOWERS._replace(contender=TRANSFERS), FIT._replace(contender="towers")
    table = {
        TOWERS: {"examples_per_second": 900.0, "ms_per_step": 1024 / 0.9},
        one: {"examples_per_second": 600.0},
        FIT: {"examples_per_second": 300.0},
        transfers: {"down_ms": 256.0, "up_ms": 128.0},
    }
    assert gpu.compute_ratios(table, FIT) == {"towers_ratio": 2.0, "many_towers_ratio": 3.0}
    share = gpu.compute_ratios(table, transfers)["share_of_step"]
    assert share == pytest.approx((256 + 128) / (1e3 * 1024 / 900))
    del table[TOWERS]
    assert gpu.compute_ratios(table, FIT) == {"towers_ratio": 2.0}
