"""The GPU benchmark's pieces and the whole of it, on CPU devices that rehearse GPUs."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest

from benchmarks import clocks, gpu, gpu_run, gpu_table, machine, process
from benchmarks.gpu_plan import TRIP, Case, Setup, plan
from benchmarks.gpu_table import FAILED, MEASURED, NOT_REACHED
from tests.processes import children, has_ended

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"
ONE, MANY = Setup("mlp41m", "float32", 1024, 1), Setup("mlp41m", "float32", 1024, 8)
TOWERS = Case(*MANY, "towers")


def start(out, *flags):
    return subprocess.Popen(
        [sys.executable, "benchmarks/gpu.py", f"--out={out}", "--small", *flags], cwd=ROOT,
        env={**os.environ, "TOWERS_REHEARSE_GPUS": "1"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def make_run(out, cases=(TOWERS,), case_seconds=60.0):
    about = {"gpus": [], "nvidia_smi": [], "small": True, "command": "", **machine.machine()}
    flags = {"small": True, "timed_seconds": 0.1}
    return gpu_run.Run(out, list(cases), case_seconds, flags, about)


def make_table(speeds, trip_ms=None):
    """{case: examples per second} -> a table of measured rows."""
    table = {
        case: {**case._asdict(), "status": MEASURED, "error": "", "examples_per_second": speed,
               "ms_per_step": 1e3 * case.batch_size / speed, "first_step_seconds": 1.0,
               "devices": "2 logical CPU devices rehearsing GPUs", "driver": "",
               **machine.machine()}
        for case, speed in speeds.items()
    }
    if trip_ms:
        row = dict.fromkeys(("down_mb", "up_mb", "down_gb_per_second", "up_gb_per_second"), 1.0)
        table[Case(*MANY, TRIP)] = {
            **next(iter(table.values())), **row, "contender": TRIP, "down_ms": trip_ms[0],
            "up_ms": trip_ms[1],
        }
    return table


def test_many_gpus_are_compared_at_the_global_batch_of_one():
    cases = set(plan(8))
    for case in cases:
        if case.contender in ("towers", "mirrored") and case.num_devices == 8:
            assert case._replace(contender="fit", num_devices=1) in cases
    sizes = {(case.batch_size, case.num_devices) for case in cases
             if case.workload == "cnn" and case.contender == "towers"}
    assert sizes == {(128, 1), (1024, 1), (1024, 8), (8192, 8)}  # 128 and 1,024 a GPU


@pytest.mark.parametrize(
    ("case_seconds", "status", "said"),
    [(0.5, FAILED, "took"), (60.0, NOT_REACHED, "cut off: took")],
)
def test_a_case_that_takes_too_long_is_killed_and_recorded(
    tmp_path, monkeypatch, case_seconds, status, said
):
    started, popen = [], subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(process.subprocess, "Popen", start)
    row = gpu_run.run_case(make_run(tmp_path, case_seconds=case_seconds), TOWERS, 0.5)
    assert row["status"] == status
    assert row["error"].startswith(f"{said} more than its 0.5 s; it last wrote: ")
    assert [child.returncode for child in started] == [-signal.SIGKILL]
    assert TOWERS.contender in (tmp_path / gpu_run.ERRORS).read_text()


def test_a_case_that_fails_is_a_row_with_its_error_and_the_next_one_goes_on(tmp_path, monkeypatch):
    def run_process(module, limit, contender, **flags):
        if contender == "towers":
            raise process.ProcessError("failed", "ResourceExhaustedError: OOM\n when", "all")
        return {"ms_per_step": 2.0, "examples_per_second": 512_000.0, "first_step_seconds": 1.0}

    monkeypatch.setattr(gpu_run, "run_process", run_process)
    run = make_run(tmp_path, [TOWERS, Case(*ONE, "fit")])
    lines = list(gpu_run.measure(run, gpu_run.begin(run), SimpleNamespace(left=lambda: 100.0)))
    assert "1 of 2, 0 s  mlp41m, 1,024 on 8 devices: towers  failed: Resource" in lines[0]
    assert "2 of 2, 0 s  mlp41m, 1,024 on 1 device: fit  2.00 ms, 512,000 examples/s" in lines[1]
    failed, measured = gpu_table.read(tmp_path / gpu_run.CSV).values()
    assert (failed["status"], failed["error"]) == (FAILED, "ResourceExhaustedError: OOM when")
    assert (measured["status"], measured["examples_per_second"]) == (MEASURED, "512000.0")


def test_sigterm_leaves_no_process_running_and_the_csv_whole(tmp_path):
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
    rows = gpu_table.read(tmp_path / gpu_run.CSV).values()
    assert {row["status"] for row in rows} == {NOT_REACHED}


@pytest.mark.matrix
def test_a_whole_small_run_writes_csv_chart_and_machine_and_goes_on_where_it_was(tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--workloads=mlp41m", "--contenders=towers,fit,trip", "--timed_seconds=0.1"]
    run = start(tmp_path, *flags)
    out, error = run.communicate(timeout=400)
    assert run.returncode == 0, error[-3000:]
    assert f"4 of 4 cases measured: {tmp_path}" in out
    with (tmp_path / "gpu.csv").open(newline="") as file:
        rows = {(row["contender"], row["num_devices"]): row for row in csv.DictReader(file)}
    towers, fit, moved = rows["towers", "2"], rows["fit", "1"], rows["trip", "2"]
    assert float(towers["examples_per_second"]) > 0 and float(towers["first_step_seconds"]) > 0
    assert float(fit["many_towers_ratio"]) > 0 and fit["how"] == "no XLA"
    assert 0 < float(moved["share_of_step"]) and float(moved["up_mb"]) > 0
    assert {row["devices"].partition(",")[2] for row in rows.values()} == {
        " small models: no measure of speed"
    }
    assert json.loads((tmp_path / "machine.json").read_text())["rehearsal"] is True
    assert (tmp_path / "gpu.png").read_bytes().startswith(PNG)
    before = (tmp_path / "gpu.csv").read_bytes()
    out, _ = start(tmp_path, *flags).communicate(timeout=400)
    assert "4 of 4 cases measured" in out and "s left" not in out
    assert (tmp_path / "gpu.csv").read_bytes() == before


def test_figures_of_another_kind_are_not_added_to(tmp_path, monkeypatch):
    monkeypatch.setenv("TOWERS_REHEARSE_GPUS", "1")
    monkeypatch.setattr(gpu, "run_process", lambda module: {"gpus": [], "cuda": ""})
    for _ in range(2):
        assert gpu.describe_machine(tmp_path, small=True)["small"] is True
    with pytest.raises(ValueError, match=r"another machine's .* \(.*differs in small\)"):
        gpu.describe_machine(tmp_path, small=False)


def test_a_stopwatch_counts_the_steps_between_two_moments_when_all_devices_are_idle(monkeypatch):
    now = [0.0]

    def wait_for_the_gpu():
        now[0] += 0.5  # what it has still to do
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
    # It begins at 2.5, before step 2, and ends at 5.5 + 0.5, after step 4.
    assert (watch.num_steps, watch.seconds, steps) == (3, 3.5, 6)


def test_ratios_are_of_rows_at_the_same_global_batch():
    fit = Case(*ONE, "fit")
    table = make_table({TOWERS: 900.0, Case(*ONE, "towers"): 600.0, fit: 300.0}, (256.0, 128.0))
    assert gpu_table.ratios(table, fit) == {"towers_ratio": 2.0, "many_towers_ratio": 3.0}
    share = gpu_table.ratios(table, Case(*MANY, TRIP))["share_of_step"]
    assert share == pytest.approx((256 + 128) / (1e3 * 1024 / 900))
    del table[TOWERS]
    assert gpu_table.ratios(table, fit)["many_towers_ratio"] == ""
