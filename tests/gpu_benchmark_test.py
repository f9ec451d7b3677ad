"""The GPU benchmark's pieces and the whole of it, on CPU devices that rehearse GPUs."""

import csv
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import (
    clocks,
    gpu,
    gpu_chart,
    gpu_plan,
    gpu_run,
    gpu_table,
    gpu_workloads,
    machine,
    process,
    trip,
)
from benchmarks.budget import case_limit
from benchmarks.contender import tower_step
from benchmarks.gpu_plan import TRIP, Case, Setup, plan, shortened
from benchmarks.gpu_table import FAILED, MEASURED, NOT_REACHED
from benchmarks.workloads import WORKLOADS
from tests import forked

ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"
ONE, MANY = Setup("mlp41m", "float32", 1024, 1), Setup("mlp41m", "float32", 1024, 8)
TOWERS = Case(*MANY, "towers")


def command(out, *flags):
    return [sys.executable, "benchmarks/gpu.py", f"--out={out}", "--small", *flags]


def environment(rehearse="1"):
    return {**os.environ, "TOWERS_REHEARSE_GPUS": rehearse}


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


def children(pid):
    """The processes that another has started and not yet waited for."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


# The plan

def test_the_plan_begins_with_towers_against_their_peers_on_every_workload():
    cases = plan(8)
    first = [case.contender for case in cases].index("compiled")
    assert {case.contender for case in cases[:first]} == {"towers", "fit", "mirrored"}
    assert {case.workload for case in cases[:first]} == set(gpu_plan.WORKLOADS)
    assert len(cases) == len(set(cases))
    switches = [i for i, case in enumerate(cases) if case.contender in ("unplaced", "on_gpu")]
    assert min(switches) > max(i for i, case in enumerate(cases) if case.contender == "fit")


def test_many_gpus_are_compared_at_the_global_batch_of_one():
    cases = set(plan(8))
    for case in cases:
        if case.contender in ("towers", "mirrored") and case.num_devices == 8:
            assert case._replace(contender="fit", num_devices=1) in cases
    sizes = {(case.batch_size, case.num_devices) for case in cases
             if case.workload == "cnn" and case.contender == "towers"}
    assert sizes == {(128, 1), (1024, 1), (1024, 8), (8192, 8)}  # 128 and 1,024 a GPU


def test_four_gpus_take_as_many_examples_each_as_eight():
    sizes = {(case.batch_size, case.num_devices) for case in plan(4, ["cnn"], ["towers"])}
    assert sizes == {(512, 1), (512, 4), (128, 1), (1024, 1), (4096, 4)}


def test_only_what_is_asked_for_is_planned_and_xla_is_not_asked_for_a_gru():
    chosen = plan(8, ["gru"], ["fit", "compiled", "fit_no_jit"])
    assert [(case.workload, case.contender) for case in chosen] == [("gru", "fit")]


def test_the_short_plan_shows_every_contender_workload_and_precision():
    cases = plan(2, small=True)
    few = shortened(cases)
    assert len(few) < len(cases) / 4
    for name in ("contender", "workload", "precision"):
        assert {getattr(case, name) for case in few} == {getattr(case, name) for case in cases}
    assert all(case._replace(contender="towers") in few for case in few)


@pytest.mark.parametrize(
    ("left", "limit"), [(100.0, 30.0), (30.0, 30.0), (20.0, 20.0), (12.0, 12.0), (11.9, None)]
)
def test_a_case_gets_what_is_left_and_none_begins_in_vain(left, limit):
    assert case_limit(left, most=30.0, least=12.0) == limit


def test_a_limit_below_the_least_time_is_a_limit_nonetheless():
    assert case_limit(100.0, most=1.0, least=12.0) == 1.0


# Running it

class FixedBudget:
    def __init__(self, seconds):
        self.seconds = seconds

    def left(self):
        return self.seconds


def test_what_is_not_reached_is_in_the_csv_from_the_start(tmp_path):
    run = make_run(tmp_path, plan(8, ["gru"], ["towers", "fit"]))
    table = gpu_run.begin(run)
    lines = list(gpu_run.measure(run, table, FixedBudget(11.0)))
    assert lines == ["11 s left: too few for another case"]
    rows = gpu_table.read(tmp_path / gpu_run.CSV)
    assert [row["status"] for row in rows.values()] == [NOT_REACHED] * 3
    assert list(rows) == run.cases


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
    lines = list(gpu_run.measure(run, gpu_run.begin(run), FixedBudget(100.0)))
    assert "1 of 2, 0 s  mlp41m, 1,024 on 8 devices: towers  failed: Resource" in lines[0]
    assert "2 of 2, 0 s  mlp41m, 1,024 on 1 device: fit  2.00 ms, 512,000 examples/s" in lines[1]
    failed, measured = gpu_table.read(tmp_path / gpu_run.CSV).values()
    assert (failed["status"], failed["error"]) == (FAILED, "ResourceExhaustedError: OOM when")
    assert (measured["status"], measured["examples_per_second"]) == (MEASURED, "512000.0")


def test_sigterm_leaves_no_process_running_and_the_csv_whole(tmp_path):
    run = subprocess.Popen(
        command(tmp_path, "--workloads=mlp41m"), cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    try:
        assert "cases on 1 CPU device rehearsing GPUs" in run.stdout.readline()
        while not (started := children(run.pid)):
            pass
        run.send_signal(signal.SIGTERM)
        out, error = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 128 + signal.SIGTERM and "ended by SIGTERM" in error
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert "not reached: mlp41m, 8 on 2 devices: mirrored" in out
    rows = gpu_table.read(tmp_path / gpu_run.CSV).values()
    assert {row["status"] for row in rows} == {NOT_REACHED}


def test_without_a_gpu_and_without_a_rehearsal_it_says_what_to_do(tmp_path):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    _, *arguments = command(tmp_path / "out")
    run = forked.run(*arguments, cwd=ROOT, environment=environment("0"))
    assert run.returncode == 2
    assert run.stderr.strip().startswith("error: TensorFlow sees no GPU here")
    assert not (tmp_path / "out").exists()


@pytest.mark.matrix
def test_a_whole_small_run_writes_csv_chart_and_machine_and_goes_on_where_it_was(tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--workloads=mlp41m", "--contenders=towers,fit,trip", "--timed_seconds=0.1"]
    run = subprocess.run(
        command(tmp_path, *flags), cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert f"4 of 4 cases measured: {tmp_path}" in run.stdout
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
    again = subprocess.run(
        command(tmp_path, *flags), cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=400,
    )
    assert "4 of 4 cases measured" in again.stdout and "s left" not in again.stdout
    assert (tmp_path / "gpu.csv").read_bytes() == before


def test_figures_of_another_kind_are_not_added_to(tmp_path, monkeypatch):
    monkeypatch.setenv("TOWERS_REHEARSE_GPUS", "1")
    monkeypatch.setattr(gpu, "run_process", lambda module: {"gpus": [], "cuda": ""})
    for _ in range(2):
        assert gpu.describe_machine(tmp_path, small=True)["small"] is True
    with pytest.raises(ValueError, match=r"another machine's .* \(.*differs in small\)"):
        gpu.describe_machine(tmp_path, small=False)


# The figures

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


@pytest.mark.parametrize("contender", ["towers", "fit"])
def test_a_stopwatch_ends_the_training_of_towers_and_of_fit(contender):
    from benchmarks.contender import batches, trainer

    workload = WORKLOADS["tiny"]()
    x, y = workload.data(2)
    watch = clocks.Stopwatch(warm_up_steps=2, warm_up_seconds=0.0, timed_seconds=0.05)
    trainer(contender, workload, 2).train(batches(x, y, workload.batch_size, 10**6), watch)
    assert watch.num_steps >= 1 and watch.seconds >= 0.05


def test_ratios_are_of_rows_at_the_same_global_batch():
    fit = Case(*ONE, "fit")
    table = make_table({TOWERS: 900.0, Case(*ONE, "towers"): 600.0, fit: 300.0}, (256.0, 128.0))
    assert gpu_table.ratios(table, fit) == {"towers_ratio": 2.0, "many_towers_ratio": 3.0}
    share = gpu_table.ratios(table, Case(*MANY, TRIP))["share_of_step"]
    assert share == pytest.approx((256 + 128) / (1e3 * 1024 / 900))
    del table[TOWERS]
    assert gpu_table.ratios(table, fit)["many_towers_ratio"] == ""


def test_the_trip_moves_every_variable_down_and_as_much_up():
    workload = gpu_workloads.load("resnet50", 4, small=True)
    step = tower_step(workload, "towers", 2)
    down, up = trip.parameters_down(step)(), trip.gradients_up(step)()
    assert [[v.shape for v in values] for values in down] == [
        [v.shape for v in step.model.variables]
    ] * 2
    operations = trip.parameters_down(step).get_concrete_function().graph.get_operations()
    copies = [op.device for op in operations if op.type == "Identity" and "CPU:1" in op.device]
    assert len(copies) == len(step.model.variables)
    assert all("CPU:0" in value.device for values in up for value in values)
    assert [len(values) for values in up] == [len(step.model.variables)] * 2
    measured = trip.measure_trip(step, 0.01)
    one_device = sum(v.numpy().nbytes for v in step.model.variables) / 1e6
    # Home is a tower's device here, to which nothing need be moved.
    assert measured["up_mb"] == pytest.approx(one_device)
    assert measured["down_mb"] == pytest.approx(one_device)
    assert measured["down_gb_per_second"] == pytest.approx(
        measured["down_mb"] / measured["down_ms"]
    )


@pytest.mark.parametrize(
    ("precision", "compute", "scaled"),
    [("float32", "float32", False), ("mixed_bfloat16", "bfloat16", False),
     ("mixed_float16", "float16", True)],
)
def test_a_precision_is_the_models_alone_and_float16_scales_its_loss(precision, compute, scaled):
    workload = gpu_workloads.load("mlp41m", 8, precision, small=True)
    before = keras.config.dtype_policy()
    assert workload.build().layers[0].compute_dtype == compute
    assert keras.config.dtype_policy() == before
    assert isinstance(workload.optimizer(), keras.optimizers.LossScaleOptimizer) == scaled


@pytest.mark.parametrize("name", gpu_workloads.NAMES)
def test_a_small_workload_takes_what_its_data_are(name):
    workload = gpu_workloads.load(name, 2, small=True)
    x, y = workload.data(1)
    assert np.all(np.isfinite(workload.build()(x)))
    assert len(y) == 2
    assert 2 <= gpu_workloads.batches_a_pass(replace(workload, batch_size=10**6)) <= 10


def test_nvidia_smi_is_asked_for_each_field_where_it_does_not_know_one(monkeypatch):
    known = {"name": ["H200", "H200"], "power.limit": ["700.00 W", "[N/A]"]}

    def query(fields):
        if not set(fields) <= set(known):
            return None
        return [list(cells) for cells in zip(*(known[field] for field in fields), strict=True)]

    monkeypatch.setattr(machine, "query", query)
    asked = machine.nvidia_smi(["name", "of.tomorrow", "power.limit"])
    assert asked == [{"name": "H200", "power.limit": "700.00 W"}, {"name": "H200"}]
    monkeypatch.setattr(machine, "query", lambda fields: None)
    assert machine.nvidia_smi() == []


def test_devices_are_said_to_be_what_they_are(monkeypatch):
    gpus = [{"name": "NVIDIA H200"}]
    assert machine.describe_devices(1, gpus) == "1 x NVIDIA H200"
    assert machine.describe_devices(8, gpus) == "8 logical GPUs on 1 x NVIDIA H200"
    monkeypatch.setenv("TOWERS_REHEARSE_GPUS", "1")
    assert machine.describe_devices(2, []) == "2 logical CPU devices rehearsing GPUs"


# The chart

def test_a_block_holds_each_peer_at_the_same_global_batch_and_each_switch():
    table = make_table({
        TOWERS: 900.0, Case(*ONE, "fit"): 300.0, Case(*MANY, "mirrored"): 450.0,
        Case(*MANY, "on_gpu"): 1800.0,
    })
    (block,) = gpu_chart.make_blocks(table)
    assert block.peers == {"fit": 3.0, "mirrored": 2.0}
    assert block.switches == {"on_gpu": 2.0}
    assert block.label.splitlines()[0] == "mlp41m, 1,024 on 8 devices"


def test_bars_begin_at_1_and_go_to_the_ratio():
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    gpu_chart.draw_bars(axes, [0.0], [{"fit": 2.0, "limit": 0.5}], gpu_chart.PEERS)
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(1, 1.0), (1, -0.5)]


def test_the_chart_says_where_there_was_no_gpu():
    assert "no GPU" in gpu_chart.title(make_table({TOWERS: 900.0}))
    row = make_table({TOWERS: 900.0})[TOWERS] | {"devices": "1 x NVIDIA H200"}
    assert gpu_chart.title({TOWERS: row}) == "Towers on GPUs"
