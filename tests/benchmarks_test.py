"""The pieces of the benchmarks work, also on rehearsed GPUs; their speed is not looked at."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from benchmarks import (
    clocks, contender, gpu, gpu_run, gpu_table, machine, process, readme, rounds, scaling, training,
)
from benchmarks.clocks import Clock
from benchmarks.gpu_plan import Case, Setup, TRIP, plan
from benchmarks.gpu_table import FAILED, MEASURED, NOT_REACHED
from benchmarks.workloads import WORKLOADS
from tests.processes import children, has_ended

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"

ON_GPUS = {"on_gpu", "copies", "stages_2", "stages_4"}  # or where these are rehearsed
INPUT_SHAPE, NUM_CLASSES = (4,), 2  # of `linear`, for train.py's synthetic examples


def run(script, *flags):
    """The rows that a benchmark's script writes to its CSV, the last of the flags."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *flags], cwd=ROOT, capture_output=True,
        text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    with open(flags[-1].removeprefix("--out="), newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["command"] for row in rows} == {f"python benchmarks/{script} {' '.join(flags)}"}
    assert all(float(row["value"]) > 0 and float(row["ratio"]) > 0 for row in rows)
    return rows


def linear(input_shape, num_classes):
    return keras.Sequential([
        keras.Input(input_shape), keras.layers.Dense(num_classes, activation="softmax")])


def tiny_batches(num_batches, passes=1):
    workload = WORKLOADS["tiny"]()
    x, y = workload.data(num_batches)
    return contender.batches(x, y, workload.batch_size, passes)


def measured(speed, memory=100.0):
    return {"examples_per_second": speed, "peak_memory_mb": memory, "device": "CPU"}


def make_rows(num_devices=2, peer_speed=50.0):
    """Ratios 100/50, 90/22.5, 80/80: 2, 4 and 1 with a peer speed of 50."""
    results = [
        {"towers": measured(100.0), "fit": measured(peer_speed)},
        {"towers": measured(90.0), "fit": measured(22.5)},
        {"towers": measured(80.0), "fit": measured(80.0, memory=70.6)},
    ]
    return rounds.compare(
        results, "towers", "examples_per_second", workload="tiny", num_devices=num_devices)


@pytest.mark.telling("towers", "fit", "mirrored")
@pytest.mark.parametrize("name", sorted({*contender.CONTENDERS} - ON_GPUS))
def test_a_contender_notes_when_each_step_ends(name):
    clock = Clock()
    contender.trainer(name, WORKLOADS["tiny"](), 2).train(tiny_batches(2, passes=2), clock)
    assert len(clock.times) == 4
    assert sorted(clock.times) == clock.times


@pytest.mark.parametrize(("step_class", "changes"), [("towers", True), ("limit", False)])
def test_the_limit_alone_changes_no_parameter(step_class, changes):
    workload, models = WORKLOADS["tiny"](), []

    def build():
        models.append(linear(INPUT_SHAPE, NUM_CLASSES))
        return models[0]

    object.__setattr__(workload, "build", build)
    train = contender.tower_trainer(workload, step_class, num_devices=2).train
    before = [v.numpy() for v in models[0].trainable_variables]
    train(tiny_batches(2), Clock())
    after = [v.numpy() for v in models[0].trainable_variables]
    same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert same == [not changes] * 2


def test_ratios_are_taken_within_a_round_and_a_repeated_comparison_counts_once():
    rows = make_rows()
    assert [row["ratio"] for row in rows] == [2.0, 4.0, 1.0]
    assert {row["median_ratio"] for row in rows} == {2.0}  # mean: 2.33; of medians: 1.8
    assert [row["peer_peak_memory_mb"] for row in rows] == [100, 100, 71]
    assert rounds.table(rows).splitlines()[1].split() == [
        "tiny", "2", "towers", "90.0", "fit", "50.0", "2.00"]
    rows += [*make_rows(num_devices=8), *make_rows(peer_speed=25.0)]
    assert [(len(group), group[0]["num_devices"], group[0]["peer_value"])
            for group in rounds.groups(rows)] == [(3, 2, 25.0), (3, 8, 50.0)]


def test_every_other_round_goes_backwards_and_a_peer_that_fails_is_left_out(monkeypatch, capsys):
    order = []

    def run_process(module, name):
        order.append(name)
        if name == "central":
            raise RuntimeError("BatchNormalization: no aggregation")
        return measured(50.0 if name == "fit" else 75.0)

    monkeypatch.setattr(rounds, "run_process", run_process)
    contenders = {name: {"name": name} for name in ("towers", "central", "fit")}
    rows = rounds.compare(
        rounds.run_rounds("contender", contenders, 3), "towers", "examples_per_second")
    assert order == ["towers", "central", "fit", "fit", "towers", "towers", "fit"]
    assert [(row["peer"], row["ratio"]) for row in rows] == [("fit", 1.5)] * 3
    assert capsys.readouterr().out.count("central is left out: BatchNormalization") == 1
    with pytest.raises(RuntimeError, match="no aggregation"):
        rounds.run_rounds("contender", {"central": {"name": "central"}}, 1)


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="No module named benchmarks.nothing"):
        process.run_process("nothing")
    written = 'I0000 oneDNN\nTraceback:\n  File "a.py"\nValueError: no\n\nbecause it is late\n'
    assert process.cause(written) == "ValueError: no\n\nbecause it is late"
    assert process.cause("FATAL Flags parsing error\n") == "FATAL Flags parsing error"


def test_a_csv_with_other_columns_is_left_alone(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text("pair,ratio\n0,1.0\n")
    with pytest.raises(ValueError, match="--out .* has other columns"):
        rounds.append_csv(path, make_rows())
    assert path.read_text() == "pair,ratio\n0,1.0\n"


@pytest.mark.matrix
def test_the_throughput_command_writes_its_csv_and_its_chart(tmp_path):
    pytest.importorskip("matplotlib")
    (row,) = run("throughput.py", "--workloads=tiny", "--peers=limit", "--rounds=1", "--steps=3",
                 f"--out={tmp_path}/out.csv")
    assert (row["contender"], row["peer"], row["steps"]) == ("towers", "limit", "3")
    assert row["tensorflow"] and row["processor"]
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


def test_steady_throughput_leaves_out_the_first_steps():
    times = [10.0, 20.0, 21.0, 23.0, 24.0]  # from step 2's end: 3 batches of 128 in 4 seconds
    assert training.throughput(times, 128, untimed=2) == {
        "examples_per_second": 96.0, "timed_seconds": 4.0}


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_measured_figures_on_pages_are_those_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    written = readme.written(page, text, readme.Results())
    assert written == text, "run python benchmarks/readme.py"
    name = readme.PAGES[page][0]
    with pytest.raises(ValueError, match=f"{page.name} has 0 places .* {name!r}"):
        readme.written(page, text.replace(f"figures: {name}", "figures: no"), readme.Results())


@pytest.mark.matrix
def test_placements_are_compared_by_time_memory_and_cpu(tmp_path):
    rows = run("placements.py", "--workload=mlp", "--num_devices=2", "--steps=2", "--rounds=1",
               "--compared=copies:towers,stages_2:towers", f"--out={tmp_path}/out.csv")
    assert [(row["contender"], row["measure"]) for row in rows] == [
        ("copies", "first_step_seconds"), ("copies", "examples_per_second"),
        ("copies", "peak_memory_mb"), ("stages_2", "first_step_seconds"),
        ("stages_2", "cpu_seconds_per_step"),
    ]


@pytest.mark.matrix
def test_the_machines_command_writes_each_part_to_its_csv(tmp_path):
    """20 MB are 8 large tensors, which travel one by one; 0.1 MB are 8 that travel as one."""
    rows = run("machines.py", "--workloads=tiny", "--workers=2", "--megabytes=0.1,20", "--rounds=1",
               "--steps=3", "--memory_steps=5,20", f"--out={tmp_path}/out.csv")
    assert [tuple(row[name] for name in ("workload", "contender", "peer", "measure", "round"))
            for row in rows] == [
        ("tiny", "2 workers", "1 worker", "examples_per_second", "0"),
        ("0.1 MB", "exchange", "ring", "ms", "0"),
        ("20 MB", "exchange", "ring", "ms", "0"),
        ("tiny", "20 steps", "5 steps", "memory_mb", "0"),  # a round is a worker
        ("tiny", "20 steps", "5 steps", "memory_mb", "1"),
        ("images", "own images", "all images", "ms", "0"),  # of one worker
        ("images", "own images", "all images", "ms", "0"),
    ]
    # Of 2 workers each sends half of its sums, and half of its gradients.
    assert [float(row["sent_mb"]) for row in rows[1:3]] == pytest.approx([0.1, 20], rel=0.5)


def test_the_model_of_a_step_finds_the_constants_that_made_its_figures():
    true = scaling.Constants(start=1e-3, message=2e-3, wire=4e8, memory=5e9)
    made = {
        (workers, size): max(1, workers / 2) * scaling.exchange_seconds(
            true, workers, size, scaling.sums_of(size))
        for workers in (2, 4, 8) for size in (1e5, 4.8e6, 32e6)
    }
    found = scaling.fit(made, true.memory, cores=2)
    assert (found.start, found.message, found.wire) == pytest.approx(
        (true.start, true.message, true.wire))


def test_a_step_on_more_workers_than_cores_takes_turns():
    """1 s of computation, 4 MB, one sum of 2 x 3 messages: by hand."""
    one = scaling.Constants(start=2e-3, message=1e-3, wire=1e9, memory=1e9)
    size = scaling.Size(parameters=4e6, sums=1, passes=5, batch_size=8)
    assert scaling.predict(one, size, 1.0, "4 towers", cores=2) == pytest.approx(1 + 8 * 4e-3)
    each = 5 * 4e-3 + 8e-3 + 6e-3 + 9e-3  # update, start and messages, 6 MB sent, 9 MB added
    assert scaling.predict(one, size, 1.0, "4 workers", cores=2) == pytest.approx(1 + 2 * each)


ONE, MANY = Setup("mlp41m", "float32", 1024, 1), Setup("mlp41m", "float32", 1024, 8)
TOWERS = Case(*MANY, "towers")


def start(out, *flags):
    return subprocess.Popen(
        [sys.executable, "benchmarks/gpu.py", f"--out={out}", "--small", *flags], cwd=ROOT,
        env={**os.environ, "TOWERS_REHEARSE_GPUS": "1"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE)


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
        " small models: no measure of speed"}
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
